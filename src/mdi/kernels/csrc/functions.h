// exp and what is made of it: our own, so that they give the same bits on every processor.
#pragma once

namespace MDI_NS {

// e^x within about one unit in the last place; 0 below -87, e^0 is 1, and NaN stays: min and max give their second number where
// one is NaN. The argument is reduced by multiples of ln 2,
// the rest (|r| <= 0.35) goes into a Taylor polynomial of degree 7. A call of its own would bring vectors of two registers through
// memory, which takes longer than all this.
__attribute__((always_inline)) inline F exp(F x) {
  F low = splat(-87.0f);
  F kept = min(splat(88.0f), max(low, x));
  F n = round(mul(kept, splat(1.44269504088896341f)));
  F r = fma(n, splat(-0.693145751953125f), kept);  // ln 2 in two parts, the first of which is exact in few bits
  r = fma(n, splat(-1.42860682030941723e-6f), r);
  F p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  F y = mul(p, power_of_two(to_int(n)));
  return choose_greater(low, x, splat(0.0f), y);
}

inline F sigmoid(F x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), x)))); }

inline F tanh(F x) {  // (1 - e^-2|x|) / (1 + e^-2|x|), and near zero, where that cancels, a polynomial
  F a = abs(x);
  F e = exp(mul(a, splat(-2.0f)));
  F y = div(sub(splat(1.0f), e), add(splat(1.0f), e));
  F s = mul(x, x);
  F p = splat(62.0f / 2835);
  p = fma(p, s, splat(-17.0f / 315));
  p = fma(p, s, splat(2.0f / 15));
  p = fma(p, s, splat(-1.0f / 3));
  F near = fma(mul(p, s), x, x);
  F far = choose_greater(splat(0.0f), x, sub(splat(0.0f), y), y);
  return choose_greater(splat(0.1f), a, near, far);
}

// Error function: Abramowitz and Stegun, 7.1.26, error below 1.5e-7; near zero its Taylor series, relative to x.
inline F erf(F x) {
  F a = abs(x);
  F t = div(splat(1.0f), fma(splat(0.3275911f), a, splat(1.0f)));
  F p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  F y = sub(splat(1.0f), mul(mul(p, t), exp(mul(sub(splat(0.0f), a), a))));
  F s = mul(x, x);
  F q = splat(1.0f / 216);
  q = fma(q, s, splat(-1.0f / 42));
  q = fma(q, s, splat(0.1f));
  q = fma(q, s, splat(-1.0f / 3));
  q = fma(q, s, splat(1.0f));
  F near = mul(mul(q, x), splat(1.12837916709551257f));
  F far = choose_greater(splat(0.0f), x, sub(splat(0.0f), y), y);
  return choose_greater(splat(0.3f), a, near, far);
}

inline F activate(F x, int kind) {
  if (kind == kSilu) return mul(x, sigmoid(x));
  if (kind == kRelu) return max(splat(0.0f), x);
  F half = mul(x, splat(0.5f));
  if (kind == kGelu) return fma(half, erf(mul(x, splat(0.707106781186547524f))), half);
  F inner = mul(splat(0.797884560802865356f), fma(mul(mul(x, x), x), splat(0.044715f), x));
  return fma(half, tanh(inner), half);
}

// What gpt-oss makes of the two halves of an MLP, both clamped: (up + 1) * gate * sigmoid(1.702 gate). What is not finite becomes NaN.
inline F clamped_glu(F gate, F up, F limit) {
  gate = sub(gate, sub(gate, gate)), up = sub(up, sub(up, up));  // x - x is zero, or NaN
  gate = min(limit, gate), up = max(sub(splat(0.0f), limit), min(limit, up));
  return mul(add(up, splat(1.0f)), mul(gate, sigmoid(mul(gate, splat(1.702f)))));
}

}  // namespace MDI_NS
