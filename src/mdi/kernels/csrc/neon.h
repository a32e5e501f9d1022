// Tiles of int8, int4 and mxfp4 for NEON. A vector of sums belongs to one of the four columns of four outputs that a line has, and
// to one row; with the matrix instructions of i8mm (MDI_I8MM), of four and more rows, to two outputs and two rows. Sums of
// a group are whole numbers, so that the bits are those of other processors.
#pragma once
#include <utility>

namespace MDI_NS {

#define MDI_INLINE __attribute__((always_inline))

// f(0), f(1), ... with constants: lanes of instructions must be, and arrays stay in registers where every index is.
template <int... i, typename Function>
inline MDI_INLINE void for_each_of(std::integer_sequence<int, i...>, Function f) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename Function>
inline MDI_INLINE void unrolled(Function f) {
  for_each_of(std::make_integer_sequence<int, n>(), f);
}

// Steps of 64 inputs, with one group of int8 or two of the others; a group is read by pairs of vectors of weights, each four
// inputs of four outputs: two lines of int8, or the two halves of the bytes of one line.
constexpr int kLinesOf32 = -32, kLinesOf16 = -16;  // in place of a format: signed bytes as they lie, in groups of so many inputs
template <int kFormat> constexpr bool kAreBytes = kFormat == kInt8 || kFormat < 0;
template <int kFormat> constexpr int kGroups = kFormat == kInt8 ? 1 : kFormat == kLinesOf16 ? 4 : 2;
template <int kFormat> constexpr int kPairs = 8 / kGroups<kFormat>;
template <int kFormat> constexpr int kPairLines = kAreBytes<kFormat> ? 2 : 1;

// Twice a number of mxfp4.
alignas(16) static const int8_t kSignedE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// How many vectors of sums a column has, and columns that are summed at a time: as many as registers hold.
#ifdef MDI_I8MM
template <int kRows> constexpr bool kInMatrices = kRows > 3;  // fewer do not pay for the order that they want
#else
template <int kRows> constexpr bool kInMatrices = false;
#endif
template <int kRows> constexpr int kVectors = kInMatrices<kRows> ? kRows + kRows % 2 : kRows;
#ifdef MDI_DOT
template <int kRows> constexpr int kColumns = kRows < 3 ? 4 : 1;
#else
template <int kRows> constexpr int kColumns = 4;
#endif

struct Pair { B first, second; };

template <int kFormat, bool kOffset>
inline MDI_INLINE Pair weight_pair(const uint8_t* p) {
  Pair w;
  w.first = vld1q_u8(p);
  if constexpr (kAreBytes<kFormat>) {
    w.second = vld1q_u8(p + 64);
    if constexpr (kFormat == kInt8 && !kOffset) w = {veorq_u8(w.first, vdupq_n_u8(0x80)), veorq_u8(w.second, vdupq_n_u8(0x80))};
  } else {
    w = {vandq_u8(w.first, vdupq_n_u8(15)), vshrq_n_u8(w.first, 4)};
    if constexpr (kFormat == kMxfp4) {
      B t = vreinterpretq_u8_s8(vld1q_s8(kSignedE2m1));
      w = {vqtbl1q_u8(t, w.first), vqtbl1q_u8(t, w.second)};
    }
  }
  return w;
}

inline MDI_INLINE int8x16_t eight_bytes_twice(const int8_t* p) {
  int64_t eight;
  __builtin_memcpy(&eight, p, 8);
  return vreinterpretq_s8_s64(vdupq_n_s64(eight));
}

#ifdef MDI_DOT
// Sums begin with the bits of 3 * 2^22: with a whole number below 2^22 added, these are the bits of the sum of both, as a float.
constexpr int32_t kBegin = 0x4b400000;
inline MDI_INLINE V sum_to_float(N sum) { return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f)); }
#ifdef MDI_I8MM
constexpr bool kHasUnsigned = true;
#else
constexpr bool kHasUnsigned = false;
#endif
#else
constexpr int32_t kBegin = 0;
inline MDI_INLINE V sum_to_float(N sum) { return vcvtq_f32_s32(sum); }
constexpr bool kHasUnsigned = false;
#endif

// How much too large the weights of a format are when they are multiplied.
template <int kFormat> constexpr int kExcess = kFormat == kInt8 ? (kHasUnsigned ? 128 : 0) : kFormat == kInt4 ? 8 : 0;

// What the sums of a vector begin with. sums: of the group's activations, for halves of 32 inputs.
template <int kRows, int kFormat, int kVector>
inline MDI_INLINE N begin_of(const int32_t* sums) {
  constexpr int excess = kExcess<kFormat>;
  if constexpr (excess == 0) return vdupq_n_s32(kBegin);
  auto of_row = [&](int m) { return kFormat == kInt8 ? sums[m] + sums[kRows + m] : sums[m]; };
  if constexpr (kInMatrices<kRows>) {
    constexpr int m = kVector / 2 * 2, next = m + 1 < kRows ? m + 1 : m;
    int32x2_t two = {kBegin - excess * of_row(m), kBegin - excess * of_row(next)};
    return vcombine_s32(two, two);
  } else {
    return vdupq_n_s32(kBegin - excess * of_row(kVector));
  }
}

// sum += products of a group: kCount columns from the first one of `line` on, with q (8 inputs by 8, of n rows each).
// kFirst: the first ones of a line, which ask for lines ahead.
template <int kRows, int kFormat, int kCount, bool kFirst>
inline MDI_INLINE void add_group(const uint8_t* line, const int8_t* q, int n, N (&sum)[kCount][kVectors<kRows>]) {
#ifndef MDI_DOT
  // Two products fit 16 bits, at most 2 * 128 * 127; of halves of bytes those of a group do: 8 of at most 15 * 127.
  int16x8_t low[kCount][kRows], high[kCount][kRows];
  N more[kCount][kRows];
#endif
  unrolled<kPairs<kFormat>>([&](auto pair) MDI_INLINE {
    constexpr int p = pair;
    const uint8_t* at = line + 64 * kPairLines<kFormat> * p;
    const int8_t* bytes = q + 8 * n * p;
    if constexpr (kFirst) {
      prefetch(at + kAhead);
      if constexpr (kFormat == kInt8) prefetch(at + 64 + kAhead);
    }
#ifdef MDI_DOT
    constexpr int n_pairs = (kRows + 1) / 2;  // registers of two rows
    int8x16_t x[n_pairs];
    unrolled<n_pairs>([&](auto i) MDI_INLINE {
      if constexpr (2 * i + 1 < kRows) x[i] = vld1q_s8(bytes + 16 * i);
      else x[i] = eight_bytes_twice(bytes + 16 * i);
    });
    unrolled<kCount>([&](auto column) MDI_INLINE {
      constexpr int c = column;
      Pair w = weight_pair<kFormat, kHasUnsigned>(at + 16 * c);
#ifdef MDI_I8MM
      if constexpr (kInMatrices<kRows>) {
        uint32x4_t a = vreinterpretq_u32_u8(w.first), b = vreinterpretq_u32_u8(w.second);
        B two[2] = {vreinterpretq_u8_u32(vzip1q_u32(a, b)), vreinterpretq_u8_u32(vzip2q_u32(a, b))};
        unrolled<kVectors<kRows>>([&](auto v) MDI_INLINE {
          if constexpr (kFormat == kInt8) sum[c][v] = vusmmlaq_s32(sum[c][v], two[v % 2], x[v / 2]);
          else sum[c][v] = vmmlaq_s32(sum[c][v], vreinterpretq_s8_u8(two[v % 2]), x[v / 2]);
        });
        return;
      }
#endif
      unrolled<kRows>([&](auto m) MDI_INLINE {
        constexpr int lane = m % 2 * 2;
#ifdef MDI_I8MM
        if constexpr (kFormat == kInt8) {
          sum[c][m] = vusdotq_laneq_s32(sum[c][m], w.first, x[m / 2], lane);
          sum[c][m] = vusdotq_laneq_s32(sum[c][m], w.second, x[m / 2], lane + 1);
          return;
        }
#endif
        sum[c][m] = vdotq_laneq_s32(sum[c][m], vreinterpretq_s8_u8(w.first), x[m / 2], lane);
        sum[c][m] = vdotq_laneq_s32(sum[c][m], vreinterpretq_s8_u8(w.second), x[m / 2], lane + 1);
      });
    });
#else
    int8x16_t x[kRows][2];
    unrolled<kRows>([&](auto m) MDI_INLINE {
      int32_t four[2];
      __builtin_memcpy(four, bytes + 8 * m, 8);
      x[m][0] = vreinterpretq_s8_s32(vdupq_n_s32(four[0])), x[m][1] = vreinterpretq_s8_s32(vdupq_n_s32(four[1]));
    });
    unrolled<kCount>([&](auto column) MDI_INLINE {
      constexpr int c = column;
      Pair w = weight_pair<kFormat, false>(at + 16 * c);
      int8x16_t a = vreinterpretq_s8_u8(w.first), b = vreinterpretq_s8_u8(w.second);
      unrolled<kRows>([&](auto m) MDI_INLINE {
        int8x16_t r = x[m][0], s = x[m][1];
        if constexpr (kAreBytes<kFormat>) {
          int16x8_t few = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(r)), vget_low_s8(b), vget_low_s8(s));
          int16x8_t others = vmlal_high_s8(vmull_high_s8(a, r), b, s);
          sum[c][m] = p ? vpadalq_s16(sum[c][m], few) : vpaddlq_s16(few);
          more[c][m] = p ? vpadalq_s16(more[c][m], others) : vpaddlq_s16(others);
        } else {
          low[c][m] = p ? vmlal_s8(low[c][m], vget_low_s8(a), vget_low_s8(r)) : vmull_s8(vget_low_s8(a), vget_low_s8(r));
          high[c][m] = p ? vmlal_high_s8(high[c][m], a, r) : vmull_high_s8(a, r);
          low[c][m] = vmlal_s8(low[c][m], vget_low_s8(b), vget_low_s8(s));
          high[c][m] = vmlal_high_s8(high[c][m], b, s);
        }
      });
    });
#endif
  });
#ifndef MDI_DOT
  // Neighbours are added in 16 bits: of int4 at most 16 * 15 * 127, of mxfp4 16 * 12 * 127.
  unrolled<kCount>([&](auto c) MDI_INLINE {
    unrolled<kRows>([&](auto m) MDI_INLINE {
      if constexpr (kAreBytes<kFormat>) sum[c][m] = vpaddq_s32(sum[c][m], more[c][m]);
      else if constexpr (kExcess<kFormat> == 0) sum[c][m] = vpaddlq_s16(vpaddq_s16(low[c][m], high[c][m]));
      else sum[c][m] = vpadalq_s16(sum[c][m], vpaddq_s16(low[c][m], high[c][m]));
    });
  });
#endif
}

// What scales the sums of a vector: weights of a column, and activations.
template <int kRows, int kVector>
inline MDI_INLINE V of_weights(V scale) {
  if constexpr (!kInMatrices<kRows>) return scale;
  else return kVector % 2 ? vzip2q_f32(scale, scale) : vzip1q_f32(scale, scale);
}
template <int kRows, int kVector>
inline MDI_INLINE V of_rows(const float* scale) {
  if constexpr (kInMatrices<kRows> && kVector / 2 * 2 + 1 < kRows) {
    int64_t two;
    __builtin_memcpy(&two, scale + kVector / 2 * 2, 8);
    return vreinterpretq_f32_s64(vdupq_n_s64(two));
  } else {
    return vdupq_n_f32(scale[kInMatrices<kRows> ? kRows - 1 : kVector]);
  }
}

// Row m of all columns.
template <int kRows, int kRow>
inline MDI_INLINE F row_of(const V (&total)[4][kVectors<kRows>]) {
  if constexpr (kInMatrices<kRows>) {
    constexpr int v = kRow / 2 * 2;
    auto column = [&](int c) MDI_INLINE {
      return kRow % 2 ? vuzp2q_f32(total[c][v], total[c][v + 1]) : vuzp1q_f32(total[c][v], total[c][v + 1]);
    };
    return {column(0), column(1), column(2), column(3)};
  } else {
    return {total[0][kRow], total[1][kRow], total[2][kRow], total[3][kRow]};
  }
}

template <int kFormat>
inline MDI_INLINE V column_scale(const uint8_t* record, int step, int group, int column) {
  if constexpr (kFormat == kMxfp4) {
    int32_t four;
    __builtin_memcpy(&four, record + 16 * (2 * step + group) + 4 * column, 4);
    uint16x8_t e = vshll_n_u8(vreinterpret_u8_s32(vdup_n_s32(four)), 7);
    return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(e), 16));
  } else {
    return half_register((const uint16_t*)record + 16 * (kFormat == kInt8 ? step : group) + 4 * column);
  }
}

template <int kRows, int kPanels, int kFormat>
void byte_tile(const MdiMatrix& w, int panel, const ByteRows& x, int m0, const Out& out) {
  constexpr int n_vectors = kVectors<kRows>, n_columns = kColumns<kRows>, n_groups = kGroups<kFormat>;
  int n_records = n_steps<kFormat>(w) / kRecordSteps<kFormat>;
  const uint8_t* start = w.data + (int64_t)panel * n_records * kRecordBytes<kFormat>;
  const int8_t* q = x.bytes(m0);
  const float* scale = x.scales(m0);
  const int32_t* sums = x.sums(m0);
  V total[4][n_vectors];
  unrolled<4>([&](auto c) MDI_INLINE { unrolled<n_vectors>([&](auto v) MDI_INLINE { total[c][v] = vdupq_n_f32(0.0f); }); });
  const uint8_t* record = start;
  for (int r = 0; r < n_records; r++, record += kRecordBytes<kFormat>) {
    unrolled<kRecordSteps<kFormat>>([&](auto step) MDI_INLINE {
      const uint8_t* line = record + 64 + step * kStepLines<kFormat> * 64;
      unrolled<4 / n_columns>([&](auto several) MDI_INLINE {
        constexpr int first = several * n_columns;
        V part[n_columns][n_vectors];
        unrolled<n_groups>([&](auto group) MDI_INLINE {
          constexpr int g = group;
          N sum[n_columns][n_vectors];
          unrolled<n_vectors>([&](auto v) MDI_INLINE {
            N begin = begin_of<kRows, kFormat, v>(sums + g * kRows);
            unrolled<n_columns>([&](auto c) MDI_INLINE { sum[c][v] = begin; });
          });
          add_group<kRows, kFormat, n_columns, first == 0>(line + g * 256 + 16 * first, q + 32 * g * kRows, kRows, sum);
          unrolled<n_columns>([&](auto c) MDI_INLINE {
            V of_column = column_scale<kFormat>(record, step, g, first + c);
            unrolled<n_vectors>([&](auto v) MDI_INLINE {
              V a = sum_to_float(sum[c][v]), s = of_weights<kRows, v>(of_column);
              if constexpr (g == 0) part[c][v] = vmulq_f32(a, s);
              else part[c][v] = vfmaq_f32(part[c][v], a, s);
            });
          });
        });
        unrolled<n_columns>([&](auto c) MDI_INLINE {
          unrolled<n_vectors>([&](auto v) MDI_INLINE {
            total[first + c][v] = vfmaq_f32(total[first + c][v], part[c][v], of_rows<kRows, v>(scale));
          });
        });
      });
      q += 64 * kRows, scale += kRows, sums += 2 * kRows;
    });
  }
  F rows[kRows];
  unrolled<kRows>([&](auto m) MDI_INLINE { rows[m] = row_of<kRows, m>(total); });
  for (int m = 0; m < kRows; m++) {
    F sum[1] = {whole_sum<kFormat>(rows[m])};
    add_large<kFormat>(sum, start, 0, x, m0 + m);
    finish(sum[0], w, panel, out, m0 + m);
  }
}

#undef MDI_INLINE
}  // namespace MDI_NS
