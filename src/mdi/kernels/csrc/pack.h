// Weights of sixteen outputs into int4: what quantize_int4 of kernels/layout.py does in numpy, number by number.
#pragma once
#include "rows.h"

namespace MDI_NS {

constexpr int kInt4Group = 32;  // inputs that share a scale

// As half precision will store it, and never zero.
inline F usable(F scale, uint16_t* half) {
  store_half(half, min(max(scale, splat(-65504.0f)), splat(65504.0f)));
  F stored = load_half(half);
  return choose_greater(abs(stored), splat(0.0f), stored, splat(1.0f));
}

// Sums of 32 numbers: those 16 apart first, then 8 apart, and so on.
template <class Term>
inline F sum_of_group(const Term& term) {
  F t[16];
  for (int i = 0; i < 16; i++) t[i] = add(term(i), term(i + 16));
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] = add(t[i], t[i + half]);
  return t[0];
}

inline F int4_step(F x, F scale) { return max(min(round(div(x, scale)), splat(7.0f)), splat(-8.0f)); }

// One group of all sixteen outputs, a lane for each: the scale with the least squared error of those that are tried, each improved
// by least squares for the steps that it led to.
inline void quantize_group(const F* x, const float* factors, int n_factors, uint16_t* scales, F* steps) {
  F largest = x[0];
  for (int i = 1; i < kInt4Group; i++) largest = choose_greater(abs(x[i]), abs(largest), x[i], largest);
  F best = splat(__builtin_inff()), best_scale = splat(0.0f), q[kInt4Group];
  uint16_t half[16];
  for (int f = 0; f < n_factors; f++) {
    F scale = usable(mul(largest, splat(factors[f])), half);
    for (int i = 0; i < kInt4Group; i++) q[i] = int4_step(x[i], scale);
    F squares = sum_of_group([&](int i) { return mul(q[i], q[i]); });
    scale = usable(div(sum_of_group([&](int i) { return mul(q[i], x[i]); }), max(squares, splat(1e-30f))), half);
    for (int i = 0; i < kInt4Group; i++) q[i] = sub(mul(int4_step(x[i], scale), scale), x[i]);
    F error = sum_of_group([&](int i) { return mul(q[i], q[i]); });
    best_scale = choose_greater(best, error, scale, best_scale);
    best = choose_greater(best, error, error, best);
  }
  store_half(scales, best_scale);
  for (int i = 0; i < kInt4Group; i++)  // no scale is better than none where numbers are too large to be squared
    steps[i] = choose_greater(abs(best_scale), splat(0.0f), int4_step(x[i], best_scale), splat(0.0f));
}

// A panel: 16 rows of `width` floats, whole records, to width / 64 records.
inline void pack_int4_panel(const float* rows, int width, const float* factors, int n_factors, uint8_t* record) {
  alignas(64) float lane[16];
  alignas(64) int8_t bytes[kInt4Group][16];
  F x[kInt4Group], steps[kInt4Group];
  for (int first = 0; first < width; first += 2 * kInt4Group, record += 9 * 64) {
    for (int group = 0; group < 2; group++) {
      for (int i = 0; i < kInt4Group; i++) {
        for (int o = 0; o < 16; o++) lane[o] = rows[(int64_t)o * width + first + group * kInt4Group + i];
        x[i] = load(lane);
      }
      quantize_group(x, factors, n_factors, (uint16_t*)record + 16 * group, steps);
      for (int i = 0; i < kInt4Group; i++) store_bytes(bytes[i], to_int(add(steps[i], splat(8.0f))));
      for (int i = 0; i < kInt4Group; i++) {  // of eight inputs, the first four are low halves and the others high ones
        uint8_t* line = record + 64 + (group * 4 + i / 8) * 64;
        for (int o = 0; o < 16; o++) {
          uint8_t& byte = line[4 * o + i % 4];
          byte = (uint8_t)(i % 8 < 4 ? bytes[i][o] : byte | bytes[i][o] << 4);
        }
      }
    }
  }
}

}  // namespace MDI_NS
