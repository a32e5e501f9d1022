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
inline void float_input(const uint8_t* const* lines, const float* x, F (&chain)[kRows][kPanels]) {
  F w[kPanels];
  #pragma GCC unroll 8
  for (int p = 0; p < kPanels; p++) {
    if constexpr (kFormat == kFloat32) w[p] = load((const float*)(lines[p] + (kSecond ? 64 : 0)));
    if constexpr (kFormat == kFp16) w[p] = load_half((const uint16_t*)(lines[p] + (kSecond ? 32 : 0)));
    if constexpr (kFormat == kBf16) w[p] = kSecond ? bf16_second(lines[p]) : bf16_first(lines[p]);
  }
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++) {
    F a = splat(x[m]);
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) chain[m][p] = fma(w[p], a, chain[m][p]);
  }
}

// x: (n_in, kRows), the rows from m0 on.
template <int kRows, int kPanels, int kFormat>
void float_tile(const MdiMatrix& w, int panel, const float* x, int m0, const Out& out) {
  int64_t panel_bytes = (int64_t)padded(w.n_in, kFormat == kFloat32 ? 1 : 2) * kBytesPerInput<kFormat>;
  const uint8_t* line[kPanels];
  F total[kRows][kPanels];
  #pragma GCC unroll 8
  for (int p = 0; p < kPanels; p++) line[p] = w.data + (panel + p) * panel_bytes;
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) total[m][p] = splat(0.0f);
  for (int first = 0; first < w.n_in; first += kBlockInputs) {
    int n = w.n_in - first < kBlockInputs ? w.n_in - first : kBlockInputs;
    F chain[kRows][kPanels];
    #pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) chain[m][p] = splat(0.0f);
    for (int pair = 0; pair < n / 2; pair++) {
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) {
        prefetch(line[p] + kAhead);
        if constexpr (kFormat == kFloat32) prefetch(line[p] + kAhead + 64);
      }
      float_input<kRows, kPanels, kFormat, false>(line, x, chain);
      float_input<kRows, kPanels, kFormat, true>(line, x + kRows, chain);
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) line[p] += 2 * kBytesPerInput<kFormat>;
      x += 2 * kRows;
    }
    if (n % 2) float_input<kRows, kPanels, kFormat, false>(line, x, chain);
    #pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) total[m][p] = add(total[m][p], chain[m][p]);
  }
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) finish(total[m][p], w, panel + p, out, m0 + m);
}

template <int kRows, int kPanels, int kFormat>
inline void float_rest(const MdiMatrix& w, int panel, const float* x, int m0, int n, const Out& out) {
  if (n == kRows) return float_tile<kRows, kPanels, kFormat>(w, panel, x, m0, out);
  if constexpr (kRows > 1) float_rest<kRows - 1, kPanels, kFormat>(w, panel, x, m0, n, out);
}

template <int kPanels, int kFormat>
void float_rows(const MdiMatrix& w, int panel, const float* x, int n_rows, const Out& out) {
  constexpr int kTile = tile_rows(kFormat);
  for (int m = 0; m < n_rows; m += kTile) {
    const float* block = x + (int64_t)m * w.n_in;
    if (m + kTile <= n_rows) float_tile<kTile, kPanels, kFormat>(w, panel, block, m, out);
    else float_rest<kTile - 1, kPanels, kFormat>(w, panel, block, m, n_rows - m, out);
  }
}

template <int kFormat>
void float_panels(const MdiMatrix& w, int first, int last, const float* x, int n_rows, const Out& out) {
  int p = first;
  // Several chains of sums at a time hide how long one addition takes.
  if (n_rows == 1) {
    for (; p + 4 <= last; p += 4) float_tile<1, 4, kFormat>(w, p, x, 0, out);
    for (; p + 2 <= last; p += 2) float_tile<1, 2, kFormat>(w, p, x, 0, out);
  }
  if (n_rows == 2)
    for (; p + 2 <= last; p += 2) float_tile<2, 2, kFormat>(w, p, x, 0, out);
  if constexpr (kFloatPanels > 1)
    for (; p + kFloatPanels <= last; p += kFloatPanels) float_rows<kFloatPanels, kFormat>(w, p, x, n_rows, out);
  for (; p < last; p++) float_rows<1, kFormat>(w, p, x, n_rows, out);
}

// ---- int8, int4 and mxfp4: bytes times bytes in whole numbers, a scale per group on both sides

// All lie in steps of 64 inputs: of int8 sixteen lines in one group, of the halves of bytes, int4 and mxfp4, eight lines in two
// groups of 32. A record has one step of int4 or two of the others. Scales are in half precision, or of mxfp4 a byte for a power
// of two.
template <int kFormat> constexpr int kStepLines = kFormat == kInt8 ? 16 : 8;
template <int kFormat> constexpr int kRecordSteps = kFormat == kInt4 ? 1 : 2;
template <int kFormat> constexpr int kRecordBytes = 64 * (1 + kStepLines<kFormat> * kRecordSteps<kFormat>);
template <int kFormat> constexpr int kHalfOffset = kFormat == kMxfp4 ? 12 : 8;  // how much too large the bytes of weights are

// Bits of a number of mxfp4 (E2M1) -> twice the number, plus 12. Sums are halved when they are whole.
alignas(16) static const uint8_t kTwiceE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <int kFormat>
inline const uint8_t* step_lines(const uint8_t* panel, uint32_t step) {
  constexpr int n = kRecordSteps<kFormat>;
  return panel + (int64_t)(step / n) * kRecordBytes<kFormat> + 64 + step % n * kStepLines<kFormat> * 64;
}

// Scales of group 0 or 1 of a step.
template <int kFormat>
inline F step_scales(const uint8_t* panel, uint32_t step, int group) {
  constexpr int n = kRecordSteps<kFormat>;
  const uint8_t* line = panel + (int64_t)(step / n) * kRecordBytes<kFormat>;
  if constexpr (kFormat == kMxfp4) return load_exponents(line + 16 * (step % n * 2 + group));
  else return load_half((const uint16_t*)line + 16 * group);
}

// A row's sum of all groups, of what the bytes of weights stand for.
template <int kFormat>
inline F whole_sum(F total) {
  if constexpr (kFormat == kMxfp4) return mul(total, splat(0.5f));
  return total;
}

template <int kFormat>
inline int n_steps(const MdiMatrix& w) {
  constexpr int n = kRecordSteps<kFormat>;
  return padded(w.n_in, 64 * n) / 64;
}

// Adds to sums of panels side by side what the large numbers of row m add, from the bytes that the tile has just read. A function of
// its own: inlined, it makes the tile's main loop slower by up to a seventh, with one row.
template <int kFormat, int kPanels>
__attribute__((noinline)) void add_large(F (&sums)[kPanels], const uint8_t* panel, int64_t panel_bytes, const ByteRows& x, int m) {
  const Large* end = x.large_of(m) + x.n_large.data()[m];
  for (const Large* large = x.large_of(m); large != end; large++) {
    uint32_t k = large->input;
    F value = splat(large->value);
    const uint8_t* at = panel;
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++, at += panel_bytes) {
      F q, scale;
      if constexpr (kFormat == kInt8) {
        const uint8_t* record = at + (int64_t)(k / 128) * (33 * 64);
        q = sub(byte_of_lane(record + 64 + k % 128 / 4 * 64, k % 4 * 8, 255), splat(128.0f));
        scale = load_half((const uint16_t*)record + k % 128 / 64 * 16);
      } else {
        const uint8_t* line = step_lines<kFormat>(at, k / 64) + k % 64 / 8 * 64;
        if constexpr (kFormat == kMxfp4) {
          alignas(64) uint8_t twice[64];
          W both = load_line(line);
          store_line(twice, looked_up(k % 8 / 4 ? high_halves(both) : low_halves(both), kTwiceE2m1));
          q = mul(sub(byte_of_lane(twice, k % 4 * 8, 255), splat((float)kHalfOffset<kFormat>)), splat(0.5f));
        } else {
          q = sub(byte_of_lane(line, k % 4 * 8 + k % 8 / 4 * 4, 15), splat((float)kHalfOffset<kFormat>));
        }
        scale = step_scales<kFormat>(at, k / 64, k % 64 / 32);
      }
      sums[p] = fma(mul(q, scale), value, sums[p]);
    }
  }
}

#ifdef MDI_NEON
}  // namespace MDI_NS
#include "neon.h"
namespace MDI_NS {
#else

template <int kFormat>
inline W half_weights(W halves) {
  if constexpr (kFormat == kMxfp4) return looked_up(halves, kTwiceE2m1);
  return halves;
}

// Copies the sums of a tile, which stay in registers only where every index is a constant, so that a loop can finish them. Where
// that loop is unrolled, too, gcc's code for four rows of int8 takes an eighth longer.
template <int kRows, int kPanels> inline void in_memory(const F (&total)[kRows][kPanels], F (&to)[kRows][kPanels]) {
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) to[m][p] = total[m][p];
}

template <int kRows, int kPanels>
void int8_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  int n_records = padded(w.n_in, 128) / 128;
  int64_t panel_bytes = (int64_t)n_records * (33 * 64);
  const uint8_t* start = w.data + panel * panel_bytes;
  const int8_t* q = x.bytes(m0);
  const float* scale = x.scales(m0);
  const int32_t* sums = x.sums(m0);
  F total[kRows][kPanels];
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) total[m][p] = splat(0.0f);
  const uint8_t* record = start;
  for (int r = 0; r < n_records; r++, record += 33 * 64) {
    for (int g = 0; g < 2; g++) {
      I sum[kRows][kPanels];
      #pragma GCC unroll 8
      for (int m = 0; m < kRows; m++)
        #pragma GCC unroll 8
        for (int p = 0; p < kPanels; p++)
          sum[m][p] = splat_int(kDotIsUnsigned ? -128 * (sums[m] + sums[kRows + m]) : 0);
      const uint8_t* line = record + 64 + g * 1024;
#pragma GCC unroll kUnrolled
      for (int i = 0; i < 16; i++) {
        W v[kPanels];
        #pragma GCC unroll 8
        for (int p = 0; p < kPanels; p++) {
          prefetch(line + p * panel_bytes + i * 64 + kAhead);
          v[p] = int8_line(line + p * panel_bytes + i * 64);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++)
          #pragma GCC unroll 8
          for (int p = 0; p < kPanels; p++) sum[m][p] = dot(sum[m][p], v[p], q + 4 * (i * kRows + m));
      }
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) {
        F s = load_half((const uint16_t*)(record + p * panel_bytes) + 16 * g);
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) total[m][p] = fma(mul(to_float(sum[m][p]), s), splat(scale[m]), total[m][p]);
      }
      q += 64 * kRows, scale += kRows, sums += 2 * kRows;
    }
  }
  F sum_of[kRows][kPanels];
  in_memory(total, sum_of);
  for (int m = 0; m < kRows; m++) {
    if (x.n_large.data()[m0 + m]) add_large<kInt8>(sum_of[m], start, panel_bytes, x, m0 + m);
    for (int p = 0; p < kPanels; p++) finish(sum_of[m][p], w, panel + p, out, m0 + m);
  }
}

template <int kRows, int kPanels, int kFormat>
void half_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  constexpr int kLines = kFormat == kMxfp4 ? kMxfp4Lines : 4;  // whose products a sum holds
  int64_t panel_bytes = (int64_t)n_steps<kFormat>(w) / kRecordSteps<kFormat> * kRecordBytes<kFormat>;
  const uint8_t* start = w.data + panel * panel_bytes;
  const int8_t* q = x.bytes(m0);
  const float* scale = x.scales(m0);
  const int32_t* sums = x.sums(m0);
  F total[kRows][kPanels];
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) total[m][p] = splat(0.0f);
  for (int step = 0; step < n_steps<kFormat>(w); step++) {
    F part[kRows][kPanels];
    for (int g = 0; g < 2; g++) {
      I whole[kRows][kPanels];
      const uint8_t* line = step_lines<kFormat>(start, step) + g * 256;
#pragma GCC unroll 4
      for (int first = 0; first < 4; first += kLines) {
        H sum[kRows][kPanels];
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++)
          #pragma GCC unroll 8
          for (int p = 0; p < kPanels; p++) sum[m][p] = begin_halves(-kHalfOffset<kFormat> * sums[m]);
#pragma GCC unroll (kUnrolled < 4 ? kUnrolled : 4)
        for (int i = first; i < first + kLines; i++) {
          W low[kPanels], high[kPanels];
          #pragma GCC unroll 8
          for (int p = 0; p < kPanels; p++) {
            prefetch(line + p * panel_bytes + i * 64 + kAhead);
            W both = load_line(line + p * panel_bytes + i * 64);
            low[p] = half_weights<kFormat>(low_halves(both)), high[p] = half_weights<kFormat>(high_halves(both));
          }
          #pragma GCC unroll 8
          for (int m = 0; m < kRows; m++)
            #pragma GCC unroll 8
            for (int p = 0; p < kPanels; p++) {
              sum[m][p] = dot_halves(sum[m][p], low[p], q + 4 * (2 * i * kRows + m));
              sum[m][p] = dot_halves(sum[m][p], high[p], q + 4 * ((2 * i + 1) * kRows + m));
            }
        }
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++)
          #pragma GCC unroll 8
          for (int p = 0; p < kPanels; p++)
            whole[m][p] = end_halves(sum[m][p], first ? whole[m][p] : splat_int(-kHalfOffset<kFormat> * sums[m]));
      }
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) {
        F s = step_scales<kFormat>(start + p * panel_bytes, step, g);
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) {
          F a = to_float(whole[m][p]);
          part[m][p] = g ? fma(a, s, part[m][p]) : mul(a, s);
        }
      }
      q += 32 * kRows, sums += kRows;
    }
    #pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) total[m][p] = fma(part[m][p], splat(scale[m]), total[m][p]);
    scale += kRows;
  }
  F sum_of[kRows][kPanels];
  in_memory(total, sum_of);
  for (int m = 0; m < kRows; m++) {
    for (int p = 0; p < kPanels; p++) sum_of[m][p] = whole_sum<kFormat>(sum_of[m][p]);
    if (x.n_large.data()[m0 + m]) add_large<kFormat>(sum_of[m], start, panel_bytes, x, m0 + m);
    for (int p = 0; p < kPanels; p++) finish(sum_of[m][p], w, panel + p, out, m0 + m);
  }
}

template <int kRows, int kPanels, int kFormat>
inline void byte_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  if constexpr (kFormat == kInt8) int8_tile<kRows, kPanels>(w, panel, x, m0, out);
  else half_tile<kRows, kPanels, kFormat>(w, panel, x, m0, out);
}
#endif

template <int kRows, int kFormat>
inline void byte_rest(const MdiMatrix& w, int panel, const ByteRows& x, int m0, int n, const Out& out) {
  if (n == kRows) return byte_tile<kRows, 1, kFormat>(w, panel, x, m0, out);
  if constexpr (kRows > 1) byte_rest<kRows - 1, kFormat>(w, panel, x, m0, n, out);
}

#ifdef MDI_AMX
}  // namespace MDI_NS
#include "amx.h"
namespace MDI_NS {
#endif

template <int kFormat>
void byte_panels(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out) {
#ifdef MDI_AMX
  if (x.for_matrix_unit) return matrix_unit_panels(w, first, last, x, n_rows, out);
#endif
  constexpr int kTile = tile_rows(kFormat);
  int p = first, whole = n_rows / kTile * kTile;
  for (; p + kBytePanels <= last; p += kBytePanels) {
    for (int m = 0; m < whole; m += kTile) byte_tile<kTile, kBytePanels, kFormat>(w, p, x, m, out);
    if (whole < n_rows)
      for (int i = 0; i < kBytePanels; i++) byte_rest<kTile - 1, kFormat>(w, p + i, x, whole, n_rows - whole, out);
  }
  for (; p < last; p++)
    for (int m = 0; m < n_rows; m += kTile) byte_rest<kTile, kFormat>(w, p, x, m, n_rows - m < kTile ? n_rows - m : kTile, out);
}

}  // namespace MDI_NS
#include "blocks.h"
namespace MDI_NS {

// ---- any format

inline bool wants_bytes(const MdiMatrix& w) { return w.format >= kInt8; }

// Whether the same prepared rows do for both.
inline bool read_the_same(const MdiMatrix& w, const MdiMatrix& v) {
  return wants_bytes(w) == wants_bytes(v) && tile_rows(w.format) == tile_rows(v.format);
}

// Rows in the form that a matrix wants, made once for all matrices that read them.
struct Rows {
  int n;
  const float* floats;    // in blocks, or null
  const ByteRows* bytes;  // or null
};

inline void multiply_panels(const MdiMatrix& w, int first, int last, const Rows& rows, const Out& out) {
  switch (w.format) {
    case kFloat32: return float_panels<kFloat32>(w, first, last, rows.floats, rows.n, out);
    case kBf16: return float_panels<kBf16>(w, first, last, rows.floats, rows.n, out);
    case kFp16: return float_panels<kFp16>(w, first, last, rows.floats, rows.n, out);
    case kInt8: return byte_panels<kInt8>(w, first, last, *rows.bytes, rows.n, out);
    case kInt4: return byte_panels<kInt4>(w, first, last, *rows.bytes, rows.n, out);
    case kMxfp4: return byte_panels<kMxfp4>(w, first, last, *rows.bytes, rows.n, out);
    case kQ8_0: return block_panels<kQ8_0>(w, first, last, *rows.bytes, rows.n, out);
    case kQ4_1: return block_panels<kQ4_1>(w, first, last, *rows.bytes, rows.n, out);
    case kQ5_0: return block_panels<kQ5_0>(w, first, last, *rows.bytes, rows.n, out);
    case kQ5_1: return block_panels<kQ5_1>(w, first, last, *rows.bytes, rows.n, out);
    case kQ4_k: return block_panels<kQ4_k>(w, first, last, *rows.bytes, rows.n, out);
    case kQ5_k: return block_panels<kQ5_k>(w, first, last, *rows.bytes, rows.n, out);
    case kQ6_k: return block_panels<kQ6_k>(w, first, last, *rows.bytes, rows.n, out);
    case kIq4_nl: return block_panels<kIq4_nl>(w, first, last, *rows.bytes, rows.n, out);
    default: return block_panels<kIq4_xs>(w, first, last, *rows.bytes, rows.n, out);
  }
}

}  // namespace MDI_NS
