// int8, int4 and mxfp4 for nine rows and more on Intel's matrix unit (AMX): a packed group of int8 is one of its tiles as it lies. Sums
// are whole numbers, so that the bits are those of dot products.
#pragma once

namespace MDI_NS {

// 16 rows in each of the tiles 0 and 1 (sums of 16 outputs), 2 and 3 (activations), and `lines` rows in 4 and 5 (weights). Constants:
// gcc 12 takes what is written into such a structure for dead stores, because it does not know that the processor reads it.
struct TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
alignas(64) static const TileShapes kInt8Tiles = {1, 0, {}, {64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16}};
alignas(64) static const TileShapes kHalfTiles = {1, 0, {}, {64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 8, 8}};

// Weights that are asked for while the sums of a record are scaled: asked for all at once they would stand in each other's way,
// and a tile load does not ask ahead by itself (16 rows of int8, 1.1 B shape: 8 GB/s without, 12 with).
constexpr int kRecordsAhead = 2 * 33 * 64;

// Sums of two groups of a record: what the matrix unit has computed and the processor then scales. While one record is scaled, the
// next one is multiplied.
struct alignas(64) GroupSums {
  int32_t of[2][16 * kMatrixBlock];
};

inline void multiply_int8(const uint8_t* record, const int8_t* q, GroupSums& sums) {
  _tile_zero(0);
  _tile_loadd(2, q, 64);
  _tile_loadd(4, record + 64, 64);
  _tile_dpbsud(0, 2, 4);
  _tile_zero(1);
  _tile_loadd(3, q + 64 * kMatrixBlock, 64);
  _tile_loadd(5, record + 64 + 1024, 64);
  _tile_dpbsud(1, 3, 5);
  _tile_stored(0, sums.of[0], 64);
  _tile_stored(1, sums.of[1], 64);
}

template <int kFormat>
inline void multiply_halves(const uint8_t* step, const int8_t* q, GroupSums& sums) {
  alignas(64) uint8_t lines[16 * 64];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    W both = load_line(step + i * 64);
    _mm512_store_si512(lines + 128 * i, half_weights<kFormat>(low_halves(both)).v);
    _mm512_store_si512(lines + 128 * i + 64, half_weights<kFormat>(high_halves(both)).v);
  }
  _tile_zero(0);
  _tile_loadd(2, q, 64);
  _tile_loadd(4, lines, 64);
  _tile_dpbsud(0, 2, 4);
  _tile_zero(1);
  _tile_loadd(3, q + 32, 64);
  _tile_loadd(5, lines + 512, 64);
  _tile_dpbsud(1, 3, 5);
  _tile_stored(0, sums.of[0], 64);
  _tile_stored(1, sums.of[1], 64);
}

// The sum of a row and output, without the offset with which weights are stored.
inline F shifted(const int32_t* sums, int m, int32_t offset) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums + 16 * m), _mm512_set1_epi32(offset)))};
}

inline void int8_matrix(const MdiMatrix& w, int panel, const ByteRows& x, int m0, F (&total)[kMatrixBlock]) {
  int n_records = padded(w.n_in, 128) / 128;
  const uint8_t* record = w.data + (int64_t)panel * n_records * (33 * 64);
  const int8_t* q = x.bytes(m0);
  const float* scale = x.scales(m0);
  const int32_t* offset = x.offsets(m0);
  GroupSums sums[2];
  multiply_int8(record, q, sums[0]);
  for (int r = 0; r < n_records; r++, record += 33 * 64) {
    q += 2 * 64 * kMatrixBlock;
    if (r + 1 < n_records) multiply_int8(record + 33 * 64, q, sums[(r + 1) % 2]);
    for (int g = 0; g < 2; g++) {
      F s = load_half((const uint16_t*)record + 16 * g);
#pragma GCC unroll 16
      for (int m = 0; m < kMatrixBlock; m++) {
        prefetch(record + kRecordsAhead + 64 * (16 * g + m));
        total[m] = fma(mul(shifted(sums[r % 2].of[g], m, offset[m]), s), splat(scale[m]), total[m]);
      }
      scale += kMatrixBlock, offset += kMatrixBlock;
    }
    prefetch(record + kRecordsAhead + 64 * 32);
  }
}

template <int kFormat>
inline void half_matrix(const MdiMatrix& w, const uint8_t* panel, const ByteRows& x, int m0, F (&total)[kMatrixBlock]) {
  int n = n_steps<kFormat>(w);
  const int8_t* q = x.bytes(m0);
  const float* scale = x.scales(m0);
  const int32_t* sum = x.sums(m0);
  GroupSums sums[2];
  multiply_halves<kFormat>(step_lines<kFormat>(panel, 0), q, sums[0]);
  for (int step = 0; step < n; step++) {
    q += 64 * kMatrixBlock;
    if (step + 1 < n) multiply_halves<kFormat>(step_lines<kFormat>(panel, step + 1), q, sums[(step + 1) % 2]);
    F s0 = step_scales<kFormat>(panel, step, 0), s1 = step_scales<kFormat>(panel, step, 1);
    const uint8_t* lines = step_lines<kFormat>(panel, step);
#pragma GCC unroll 16
    for (int m = 0; m < kMatrixBlock; m++) {
      if (m < 9) prefetch(lines - 64 + kRecordsAhead + 64 * m);
      F a = shifted(sums[step % 2].of[0], m, kHalfOffset<kFormat> * sum[m]);
      F b = shifted(sums[step % 2].of[1], m, kHalfOffset<kFormat> * sum[kMatrixBlock + m]);
      total[m] = fma(fma(b, s1, mul(a, s0)), splat(scale[m]), total[m]);
    }
    scale += kMatrixBlock, sum += 2 * kMatrixBlock;
  }
}

template <int kFormat>
inline void matrix_unit_format(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out) {
  _tile_loadconfig(kFormat == kInt8 ? &kInt8Tiles : &kHalfTiles);
  int64_t panel_bytes = (int64_t)padded(w.n_in, 128) / 128 * (33 * 64);
  if constexpr (kFormat != kInt8) panel_bytes = (int64_t)n_steps<kFormat>(w) / kRecordSteps<kFormat> * kRecordBytes<kFormat>;
  for (int p = first; p < last; p++) {
    const uint8_t* start = w.data + p * panel_bytes;
    for (int m0 = 0; m0 < n_rows; m0 += kMatrixBlock) {
      F total[kMatrixBlock];
      for (int m = 0; m < kMatrixBlock; m++) total[m] = splat(0.0f);
      if constexpr (kFormat == kInt8) int8_matrix(w, p, x, m0, total);
      else half_matrix<kFormat>(w, start, x, m0, total);
      for (int m = 0; m < kMatrixBlock && m0 + m < n_rows; m++) {
        F sum[1] = {whole_sum<kFormat>(total[m])};
        add_large<kFormat>(sum, start, panel_bytes, x, m0 + m);
        finish(sum[0], w, p, out, m0 + m);
      }
    }
  }
  _tile_release();
}

inline void matrix_unit_panels(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out) {
  switch (w.format) {
    case kInt8: return matrix_unit_format<kInt8>(w, first, last, x, n_rows, out);
    case kInt4: return matrix_unit_format<kInt4>(w, first, last, x, n_rows, out);
    default: return matrix_unit_format<kMxfp4>(w, first, last, x, n_rows, out);
  }
}

}  // namespace MDI_NS
