// y = x W^T + b over packed weights. A panel of sixteen outputs is one stream of bytes; the first tile of rows brings it from
// memory, the others find it in the cache. Each output is summed in an order that follows from the inputs alone: neither the
// number of rows nor that of threads changes a bit.
#pragma once

namespace MDI_NS {

constexpr int kBlockInputs = 256;   // inputs of a float format that are summed in one chain
constexpr int kAhead = 4096;        // bytes that are asked for ahead of their use

// Where results go: row m of the panel at y + m * stride.
struct Out {
  float* y;
  int64_t stride;
};

inline void finish(F total, const MdiMatrix& w, int panel, const Out& out, int m) {
  int first = panel * kPanel, n = w.n_out - first;
  if (w.bias) total = add(total, load_part(w.bias + first, n));
  store_part(out.y + m * out.stride + first, total, n);
}

// ---- formats of floats: float32, bfloat16 and half precision, multiplied by float32 activations

template <int kFormat> constexpr int kBytesPerInput = kFormat == kFloat32 ? 64 : 32;  // of a panel

template <int kRows, int kPanels, int kFormat, bool kSecond>
inline void float_input(const uint8_t* const* lines, const float* const* x, int k, F (&chain)[kRows][kPanels]) {
  F w[kPanels];
  for (int p = 0; p < kPanels; p++) {
    if constexpr (kFormat == kFloat32) w[p] = load((const float*)(lines[p] + (kSecond ? 64 : 0)));
    if constexpr (kFormat == kFp16) w[p] = load_half((const uint16_t*)(lines[p] + (kSecond ? 32 : 0)));
    if constexpr (kFormat == kBf16) w[p] = kSecond ? bf16_second(lines[p]) : bf16_first(lines[p]);
  }
  for (int m = 0; m < kRows; m++) {
    F a = splat(x[m][k]);
    for (int p = 0; p < kPanels; p++) chain[m][p] = fma(w[p], a, chain[m][p]);
  }
}

template <int kRows, int kPanels, int kFormat>
void float_tile(const MdiMatrix& w, int panel, const float* rows, int64_t stride, int m0, const Out& out) {
  int64_t panel_bytes = (int64_t)padded(w.n_in, kFormat == kFloat32 ? 1 : 2) * kBytesPerInput<kFormat>;
  const uint8_t* line[kPanels];
  const float* x[kRows];
  F total[kRows][kPanels];
  for (int p = 0; p < kPanels; p++) line[p] = w.data + (panel + p) * panel_bytes;
  for (int m = 0; m < kRows; m++) {
    x[m] = rows + (m0 + m) * stride;
    for (int p = 0; p < kPanels; p++) total[m][p] = splat(0.0f);
  }
  for (int first = 0; first < w.n_in; first += kBlockInputs) {
    int last = first + kBlockInputs < w.n_in ? first + kBlockInputs : w.n_in;
    F chain[kRows][kPanels];
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kPanels; p++) chain[m][p] = splat(0.0f);
    int k = first;
    for (; k + 1 < last; k += 2) {
      for (int p = 0; p < kPanels; p++) {
        prefetch(line[p] + kAhead);
        if constexpr (kFormat == kFloat32) prefetch(line[p] + kAhead + 64);
      }
      float_input<kRows, kPanels, kFormat, false>(line, x, k, chain);
      float_input<kRows, kPanels, kFormat, true>(line, x, k + 1, chain);
      for (int p = 0; p < kPanels; p++) line[p] += 2 * kBytesPerInput<kFormat>;
    }
    if (k < last) float_input<kRows, kPanels, kFormat, false>(line, x, k, chain);
    for (int m = 0; m < kRows; m++)
      for (int p = 0; p < kPanels; p++) total[m][p] = add(total[m][p], chain[m][p]);
  }
  for (int m = 0; m < kRows; m++)
    for (int p = 0; p < kPanels; p++) finish(total[m][p], w, panel + p, out, m0 + m);
}

template <int kPanels, int kFormat>
void float_rows(const MdiMatrix& w, int panel, const float* rows, int64_t stride, int n_rows, const Out& out) {
  int m = 0;
  for (; m + kFloatTileRows <= n_rows; m += kFloatTileRows)
    float_tile<kFloatTileRows, kPanels, kFormat>(w, panel, rows, stride, m, out);
  if constexpr (kFloatTileRows > 4)
    for (; m + 4 <= n_rows; m += 4) float_tile<4, kPanels, kFormat>(w, panel, rows, stride, m, out);
  for (; m + 2 <= n_rows; m += 2) float_tile<2, kPanels, kFormat>(w, panel, rows, stride, m, out);
  if (m < n_rows) float_tile<1, kPanels, kFormat>(w, panel, rows, stride, m, out);
}

template <int kFormat>
void float_panels(const MdiMatrix& w, int first, int last, const float* rows, int64_t stride, int n_rows, const Out& out) {
  constexpr int kWide = kFloatPanels > 1 ? kFloatPanels : 2;
  int p = first;
  if (n_rows == 1)  // four chains of sums at a time, which hide how long one addition takes
    for (; p + 4 <= last; p += 4) float_tile<1, 4, kFormat>(w, p, rows, stride, 0, out);
  if (kFloatPanels > 1 || n_rows == 1)
    for (; p + kWide <= last; p += kWide) float_rows<kWide, kFormat>(w, p, rows, stride, n_rows, out);
  for (; p < last; p++) float_rows<1, kFormat>(w, p, rows, stride, n_rows, out);
}

// ---- int8 and int4: bytes times bytes in whole numbers, a scale per group on both sides

// What the large numbers of a row add, from the bytes that the tile has just read.
template <int kFormat>
inline F add_large(F total, const uint8_t* panel, const ByteRows& x, int m) {
  const Large* large = x.large_of(m);
  for (int i = 0; i < x.n_large.data()[m]; i++) {
    int k = large[i].input;
    F q, scale;
    if constexpr (kFormat == kInt8) {
      const uint8_t* record = panel + (int64_t)(k / 128) * (33 * 64);
      q = sub(byte_of_lane(record + 64 + k % 128 / 4 * 64, k % 4 * 8, 255), splat(128.0f));
      scale = load_half((const uint16_t*)record + k % 128 / 64 * 16);
    } else {
      const uint8_t* record = panel + (int64_t)(k / 64) * (9 * 64);
      q = sub(byte_of_lane(record + 64 + k % 64 / 8 * 64, k % 4 * 8 + k % 8 / 4 * 4, 15), splat(8.0f));
      scale = load_half((const uint16_t*)record + k % 64 / 32 * 16);
    }
    total = fma(mul(q, scale), splat(large[i].value), total);
  }
  return total;
}

template <int kRows>
void int8_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  int n_records = padded(w.n_in, 128) / 128;
  const uint8_t* start = w.data + (int64_t)panel * n_records * (33 * 64);
  const int8_t* q[kRows];
  const float* scale[kRows];
  const int32_t* sums[kRows];
  F total[kRows];
  for (int m = 0; m < kRows; m++) {
    q[m] = x.bytes(m0 + m), scale[m] = x.scales(m0 + m), sums[m] = x.sums(m0 + m);
    total[m] = splat(0.0f);
  }
  const uint8_t* record = start;
  for (int r = 0; r < n_records; r++, record += 33 * 64) {
    for (int g = 0; g < 2; g++) {
      I sum[kRows];
      for (int m = 0; m < kRows; m++)
        sum[m] = splat_int(kDotIsUnsigned ? -128 * (sums[m][4 * r + 2 * g] + sums[m][4 * r + 2 * g + 1]) : 0);
      const uint8_t* line = record + 64 + g * 1024;
      for (int i = 0; i < 16; i++) {
        prefetch(line + i * 64 + kAhead);
        W v = int8_line(line + i * 64);
        for (int m = 0; m < kRows; m++) sum[m] = dot(sum[m], v, q[m] + 128 * r + 64 * g + 4 * i);
      }
      F s = load_half((const uint16_t*)record + 16 * g);
      for (int m = 0; m < kRows; m++) total[m] = fma(mul(to_float(sum[m]), splat(scale[m][2 * r + g])), s, total[m]);
    }
  }
  for (int m = 0; m < kRows; m++) finish(add_large<kInt8>(total[m], start, x, m0 + m), w, panel, out, m0 + m);
}

template <int kRows>
void int4_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  int n_records = padded(w.n_in, 64) / 64;
  const uint8_t* start = w.data + (int64_t)panel * n_records * (9 * 64);
  const int8_t* q[kRows];
  const float* scale[kRows];
  const int32_t* sums[kRows];
  F total[kRows];
  for (int m = 0; m < kRows; m++) {
    q[m] = x.bytes(m0 + m), scale[m] = x.scales(m0 + m), sums[m] = x.sums(m0 + m);
    total[m] = splat(0.0f);
  }
  const uint8_t* record = start;
  for (int r = 0; r < n_records; r++, record += 9 * 64) {
    prefetch(record + kAhead);
    for (int g = 0; g < 2; g++) {
      I sum[kRows];
      for (int m = 0; m < kRows; m++) sum[m] = splat_int(-8 * sums[m][2 * r + g]);
      const uint8_t* line = record + 64 + g * 256;
      for (int i = 0; i < 4; i++) {
        prefetch(line + i * 64 + kAhead);
        W both = load_line(line + i * 64);
        W low = low_halves(both), high = high_halves(both);
        for (int m = 0; m < kRows; m++) {
          const int8_t* four = q[m] + 64 * r + 32 * g + 8 * i;
          sum[m] = dot_halves(dot_halves(sum[m], low, four), high, four + 4);
        }
      }
      F s = load_half((const uint16_t*)record + 16 * g);
      for (int m = 0; m < kRows; m++) total[m] = fma(mul(to_float(sum[m]), splat(scale[m][r])), s, total[m]);
    }
  }
  for (int m = 0; m < kRows; m++) finish(add_large<kInt4>(total[m], start, x, m0 + m), w, panel, out, m0 + m);
}

template <int kRows>
inline void byte_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  if (w.format == kInt8) int8_tile<kRows>(w, panel, x, m0, out);
  else int4_tile<kRows>(w, panel, x, m0, out);
}

template <int kRows>
inline void byte_rest(const MdiMatrix& w, int panel, const ByteRows& x, int m0, int n, const Out& out) {
  if (n == kRows) return byte_tile<kRows>(w, panel, x, m0, out);
  if constexpr (kRows > 1) byte_rest<kRows - 1>(w, panel, x, m0, n, out);
}

inline void byte_panels(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out) {
  for (int p = first; p < last; p++) {
    int m = 0;
    for (; m + kTileRows <= n_rows; m += kTileRows) byte_tile<kTileRows>(w, p, x, m, out);
    if (m < n_rows) byte_rest<kTileRows>(w, p, x, m, n_rows - m, out);
  }
}

// ---- any format

inline bool wants_bytes(const MdiMatrix& w) { return w.format == kInt8 || w.format == kInt4; }

// Rows in the forms that matrices want, made once for all matrices that read them.
struct Rows {
  const float* x = nullptr;  // (n, stride)
  int64_t stride = 0;
  int n = 0;
  const ByteRows* bytes = nullptr;
};

inline void multiply_panels(const MdiMatrix& w, int first, int last, const Rows& rows, const Out& out) {
  switch (w.format) {
    case kFloat32: return float_panels<kFloat32>(w, first, last, rows.x, rows.stride, rows.n, out);
    case kBf16: return float_panels<kBf16>(w, first, last, rows.x, rows.stride, rows.n, out);
    case kFp16: return float_panels<kFp16>(w, first, last, rows.x, rows.stride, rows.n, out);
    default: return byte_panels(w, first, last, *rows.bytes, rows.n, out);
  }
}

}  // namespace MDI_NS
