// RMSNorm and LayerNorm of one row.
#pragma once

namespace MDI_NS {

template <class Term>
inline float sum_of(const float* x, int n, Term term) {  // over whole vectors first, then over their lanes
  F total = splat(0.0f);
  for (int i = 0; i < n; i += 16) {
    F t = term(load_part(x + i, n - i));
    total = add(total, n - i < 16 ? first_lanes(t, n - i, splat(0.0f)) : t);
  }
  return sum(total);
}

inline void normalize(const MdiNorm& norm, const float* x, int n, float* y) {
  float mean = 0;
  if (norm.type == kLayerNorm) mean = sum_of(x, n, [](F a) { return a; }) / (float)n;
  F shift = splat(mean);
  float square = sum_of(x, n, [shift](F a) { F d = sub(a, shift); return mul(d, d); }) / (float)n;
  F factor = splat(1.0f / __builtin_sqrtf(square + norm.eps));
  for (int i = 0; i < n; i += 16) {
    F gain = load_part(norm.weight + i, n - i);
    if (norm.unit_offset) gain = add(gain, splat(1.0f));
    F value = mul(mul(sub(load_part(x + i, n - i), shift), factor), gain);
    if (norm.bias) value = add(value, load_part(norm.bias + i, n - i));
    store_part(y + i, value, n - i);
  }
}

}  // namespace MDI_NS
