// Rotary positions of one head, in place.
#pragma once

namespace MDI_NS {

constexpr int kMostRope = 1024;  // numbers of a head that are turned; blocks.py refuses more

// cos, sin: (n) for the position. The second half of the numbers is turned against the first one. Where pairs are interleaved
// they are brought into that order, as litgpt does.
inline void rotate(float* head, const float* cos, const float* sin, int n, bool interleaved) {
  float x[kMostRope];
  int half = n / 2, rest = n - half;
  for (int i = 0; i < n; i++) x[i] = interleaved ? head[i < half ? 2 * i : 2 * (i - half) + 1] : head[i];
  for (int i = 0; i < rest; i++) head[i] = x[i] * cos[i] + -x[half + i] * sin[i];
  for (int i = rest; i < n; i++) head[i] = x[i] * cos[i] + x[i - rest] * sin[i];
}

}  // namespace MDI_NS
