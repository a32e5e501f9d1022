// Rows of activations as the matrix kernels take them: floats, or bytes in groups of 64 with a scale each.
#pragma once
#include "buffer.h"

namespace MDI_NS {

constexpr int kPanel = 16;         // outputs that lie side by side in a packed weight
constexpr int kGroup = 64;         // inputs of a row that share a scale
constexpr int kMostLarge = 4;      // numbers of a group that may be left out of the bytes
constexpr float kLargeRatio = 10.0f;  // a number is large if it is so many times the mean of its group

inline int padded(int n, int to) { return (n + to - 1) / to * to; }

// One vector of a row, zeros behind its end.
inline F load_part(const float* p, int n) {
  if (n >= 16) return load(p);
  alignas(64) float part[16] = {0};
  std::memcpy(part, p, (size_t)n * sizeof(float));
  return load(part);
}
inline void store_part(float* p, F x, int n) {
  if (n >= 16) return store(p, x);
  alignas(64) float part[16];
  store(part, x);
  std::memcpy(p, part, (size_t)n * sizeof(float));
}

// A number that is far larger than the rest of its group: multiplied beside, so that the rest keeps its precision
// (LLM.int8(), Dettmers et al. 2022, section 3, does so for whole columns).
struct Large {
  uint32_t input;
  float value;
};

// Rows lie in blocks of as many as a tile multiplies at once, tile_rows(format): the same few numbers of all rows of a block, of
// bytes kPiece, then the next few, so that a tile reads one stream. The last block has as many rows as are left.
struct RowBlock {
  int first, n;
  RowBlock(int row, int n_rows, int most)
      : first(row / most * most), n(n_rows - first < most ? n_rows - first : most) {}
};

// Many rows may be multiplied by the processor's matrix unit instead (amx.h): then blocks are of 16 rows, always whole, and hold
// the 64 numbers of a group of one row, then those of the next row.
#ifdef MDI_AMX
constexpr int kMatrixRows = 9;  // from how many rows on
#else
constexpr int kMatrixRows = 1 << 30;
#endif
constexpr int kMatrixBlock = 16;

// Rows in bytes: q stays within +-127, a row is about q * scale group by group, plus its large numbers. The scale of a group with
// a number that is not finite is NaN, and so is every product with the row: maxima and bytes would hide it.
struct ByteRows {
  int n_rows = 0, n_in = 0, width = 0;  // width: inputs in whole records of any format
  int tile = 0;                         // rows of a block
  bool for_matrix_unit = false;
  Buffer<int8_t> q;                     // per block (width / kPiece, rows, kPiece), or (width / 64, 16, 64)
  Buffer<float> scale;                  // per block (width / 64, rows)
  Buffer<int32_t> sum;                  // per block (width / 32, rows): sums of q
  Buffer<int32_t> quarter;              // per block (width / 16, rows): sums of half as many
  Buffer<float> float_sum;              // `sum` in floats
  Buffer<int32_t> offset;               // per block (width / 64, rows): 128 times the sums, for the matrix unit
  Buffer<Large> large;                  // (n_rows, kMostLarge * width / 64)
  Buffer<int32_t> n_large;              // (n_rows)

  void reserve(int rows, int inputs, int rows_of_tile) {
    n_rows = rows, n_in = inputs, width = padded(inputs, 128);
    for_matrix_unit = rows >= kMatrixRows;
    tile = for_matrix_unit ? kMatrixBlock : rows_of_tile;
    if (for_matrix_unit) rows = padded(rows, kMatrixBlock);
    int rest = rows - n_rows;  // of the last block: rows that nobody wants, but that are computed
    q.of((size_t)rows * width);
    scale.of((size_t)rows * (width / 64));
    sum.of((size_t)rows * (width / 32));
    quarter.of((size_t)rows * (width / 16));
    float_sum.of((size_t)rows * (width / 32));
    offset.of((size_t)rows * (width / 64));
    if (rest > 0) {
      int last = rows - kMatrixBlock;
      std::memset(bytes(last), 0, (size_t)kMatrixBlock * width);
      std::memset(scales(last), 0, sizeof(float) * kMatrixBlock * (width / 64));
      std::memset(sums(last), 0, sizeof(int32_t) * kMatrixBlock * (width / 32));
      std::memset(quarters(last), 0, sizeof(int32_t) * kMatrixBlock * (width / 16));
      std::memset(float_sums(last), 0, sizeof(float) * kMatrixBlock * (width / 32));
      std::memset(offsets(last), 0, sizeof(int32_t) * kMatrixBlock * (width / 64));
    }
    large.of((size_t)rows * kMostLarge * (width / 64));
    n_large.of((size_t)rows);
  }
  int8_t* bytes(int block_row) const { return q.data() + (size_t)block_row * width; }
  float* scales(int block_row) const { return scale.data() + (size_t)block_row * (width / 64); }
  int32_t* sums(int block_row) const { return sum.data() + (size_t)block_row * (width / 32); }
  int32_t* quarters(int block_row) const { return quarter.data() + (size_t)block_row * (width / 16); }
  float* float_sums(int block_row) const { return float_sum.data() + (size_t)block_row * (width / 32); }
  int32_t* offsets(int block_row) const { return offset.data() + (size_t)block_row * (width / 64); }
  RowBlock block_of(int m) const {
    return RowBlock(m, for_matrix_unit ? padded(n_rows, kMatrixBlock) : n_rows, tile);
  }
  Large* large_of(int m) const { return large.data() + (size_t)m * kMostLarge * (width / 64); }
};

// Takes the largest numbers out of a group of 64 as long as they stand out, and returns the largest that is left; NaN, with zeros
// in the group, if a number is not finite.
inline float take_large(float* group, int first, Large* large, int32_t& n_large) {
  for (int taken = 0;; taken++) {
    F top = splat(0.0f), total = splat(0.0f);
    for (int i = 0; i < kGroup; i += 16) {
      F a = abs(load(group + i));
      top = max(top, a);
      total = add(total, a);
    }
    float biggest = largest(top), all = sum(total);
    // written so that a group with a number that is not finite ends here; its maximum may have lost NaN, the sum has not
    if (taken == kMostLarge || !(biggest * kGroup > kLargeRatio * all)) {
      if (all == all && biggest < __builtin_inff()) return biggest;
      std::memset(group, 0, sizeof(float) * kGroup);
      return __builtin_nanf("");
    }
    for (int i = 0; i < kGroup; i++) {
      if (__builtin_fabsf(group[i]) == biggest) {
        large[n_large++] = {(uint32_t)(first + i), group[i]};
        group[i] = 0;
        break;
      }
    }
  }
}

// Row m (n_in) into bytes.
inline void quantize_row(const float* row, int m, const ByteRows& to) {
  RowBlock block = to.block_of(m);
  int at = m - block.first, n = block.n;
  int8_t* q = to.bytes(block.first);
  float* scale = to.scales(block.first) + at;
  int32_t *sums = to.sums(block.first) + at, *quarters = to.quarters(block.first) + at;
  float* float_sums = to.float_sums(block.first) + at;
  Large* large = to.large_of(m);
  int32_t n_large = 0;
  alignas(64) float group[kGroup];
  alignas(64) int8_t bytes[kGroup];
  for (int first = 0; first < to.width; first += kGroup) {
    int there = to.n_in - first < kGroup ? to.n_in - first : kGroup;
    if (there < kGroup) std::memset(group, 0, sizeof group);
    if (there > 0) std::memcpy(group, row + first, (size_t)there * sizeof(float));
    float biggest = take_large(group, first, large, n_large);
    F inverse = splat(biggest > 1e-35f ? 127.0f / biggest : 0.0f);
    scale[(int64_t)first / 64 * n] = biggest / 127.0f;
    for (int half = 0; half < 2; half++) {
      I low = to_int(mul(load(group + 32 * half), inverse)), high = to_int(mul(load(group + 32 * half + 16), inverse));
      store_bytes(bytes + 32 * half, low);
      store_bytes(bytes + 32 * half + 16, high);
      int32_t first_sum = sum_int(low), second_sum = sum_int(high);
      int64_t place = (int64_t)first / 32 + half;
      quarters[2 * place * n] = first_sum, quarters[(2 * place + 1) * n] = second_sum;
      sums[place * n] = first_sum + second_sum;
      float_sums[place * n] = (float)(first_sum + second_sum);
    }
    if (to.for_matrix_unit) {
      to.offsets(block.first)[(int64_t)first / 64 * n + at] = 128 * (sums[first / 32 * n] + sums[(first / 32 + 1) * n]);
      std::memcpy(q + (int64_t)first * n + at * kGroup, bytes, kGroup);
      continue;
    }
    for (int i = 0; i < kGroup; i += kPiece) std::memcpy(q + ((int64_t)first + i) * n + kPiece * at, bytes + i, kPiece);
  }
  to.n_large.data()[m] = n_large;
}

// Row m of floats (n_in) to its place in its block: (n_in, rows).
inline void interleave_row(const float* row, int m, int n_rows, int n_in, int rows_of_tile, float* to) {
  RowBlock block(m, n_rows, rows_of_tile);
  float* at = to + (int64_t)block.first * n_in + (m - block.first);
  for (int k = 0; k < n_in; k++) at[(int64_t)k * block.n] = row[k];
}

}  // namespace MDI_NS
