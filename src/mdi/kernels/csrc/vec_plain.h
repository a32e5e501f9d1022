// Sixteen lanes in an array, for any machine. A fused multiply-add is two roundings here: results differ by rounding.
#pragma once
#include <cstdint>
#include <cstring>

namespace MDI_NS {

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct W { uint8_t v[64]; };

constexpr int tile_rows(int) { return 2; }  // of any format
constexpr int kFloatPanels = 1;
constexpr int kBytePanels = 1;   // the same where weights are bytes
constexpr int kPiece = 4;        // inputs of a row that lie together in its block
constexpr int kUnrolled = 16;    // lines of bytes whose products stand one after the other in the code
constexpr int kSums = 4;         // sums of attention that stay in registers
constexpr bool kDotIsUnsigned = false;
constexpr int narrow_lines(int) { return 0; }

#define MDI_LANES(expression) for (int i = 0; i < 16; i++) { expression; }

inline F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
inline void store(float* p, F a) { std::memcpy(p, a.v, 64); }
inline F splat(float x) { F r; MDI_LANES(r.v[i] = x) return r; }
inline F add(F a, F b) { MDI_LANES(a.v[i] += b.v[i]) return a; }
inline F sub(F a, F b) { MDI_LANES(a.v[i] -= b.v[i]) return a; }
inline F mul(F a, F b) { MDI_LANES(a.v[i] *= b.v[i]) return a; }
inline F div(F a, F b) { MDI_LANES(a.v[i] /= b.v[i]) return a; }
inline F fma(F a, F b, F c) { MDI_LANES(a.v[i] = a.v[i] * b.v[i] + c.v[i]) return a; }
inline F min(F a, F b) { MDI_LANES(a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]) return a; }
inline F max(F a, F b) { MDI_LANES(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]) return a; }
inline F abs(F a) { MDI_LANES(a.v[i] = __builtin_fabsf(a.v[i])) return a; }
inline F round(F a) { MDI_LANES(a.v[i] = __builtin_nearbyintf(a.v[i])) return a; }
inline F choose_greater(F a, F b, F x, F y) { MDI_LANES(a.v[i] = a.v[i] > b.v[i] ? x.v[i] : y.v[i]) return a; }
inline F first_lanes(F a, int n, F other) { MDI_LANES(a.v[i] = i < n ? a.v[i] : other.v[i]) return a; }

inline I splat_int(int32_t x) { I r; MDI_LANES(r.v[i] = x) return r; }
inline I to_int(F a) { I r; MDI_LANES(r.v[i] = a.v[i] == a.v[i] ? (int32_t)__builtin_nearbyintf(a.v[i]) : 0) return r; }
inline F to_float(I a) { F r; MDI_LANES(r.v[i] = (float)a.v[i]) return r; }
inline F power_of_two(I n) { F r; MDI_LANES(uint32_t bits = (uint32_t)(n.v[i] + 127) << 23; std::memcpy(&r.v[i], &bits, 4)) return r; }
inline void store_bytes(int8_t* p, I a) { MDI_LANES(p[i] = (int8_t)a.v[i]) }
inline F load_bytes(const int8_t* p) { F r; MDI_LANES(r.v[i] = p[i]) return r; }
inline int32_t sum_int(I a) { int32_t s = 0; MDI_LANES(s += a.v[i]) return s; }

inline W load_line(const uint8_t* p) { W r; std::memcpy(r.v, p, 64); return r; }
inline W int8_line(const uint8_t* p) { W r; for (int i = 0; i < 64; i++) r.v[i] = p[i] ^ 0x80; return r; }
inline W low_halves(W a) { for (uint8_t& b : a.v) b &= 15; return a; }
inline W high_halves(W a) { for (uint8_t& b : a.v) b >>= 4; return a; }
inline W looked_up(W a, const uint8_t* table) { for (uint8_t& b : a.v) b = table[b]; return a; }
template <int kRight> inline W bits_of(W a, int mask) {
  for (uint8_t& b : a.v) b = (uint8_t)((kRight < 0 ? b << (kRight < 0 ? -kRight : 0) : b >> (kRight < 0 ? 0 : kRight)) & mask);
  return a;
}
inline W either(W a, W b) { for (int i = 0; i < 64; i++) a.v[i] |= b.v[i]; return a; }
inline W less(W a, int n) { for (uint8_t& b : a.v) b = (uint8_t)(b - n); return a; }  // of each byte
inline void store_line(uint8_t* p, W a) { std::memcpy(p, a.v, 64); }
inline I dot(I sum, W w, const int8_t* x) {
  MDI_LANES(const uint8_t* q = w.v + 4 * i;
            sum.v[i] += (int8_t)q[0] * x[0] + (int8_t)q[1] * x[1] + (int8_t)q[2] * x[2] + (int8_t)q[3] * x[3])
  return sum;
}
using H = I;
inline H begin_halves(int32_t start) { return splat_int(start); }
inline H dot_halves(H sum, W w, const int8_t* x) { return dot(sum, w, x); }
inline I end_halves(H sum, I) { return sum; }
constexpr int kMxfp4Lines = 4;  // of a group whose products such a sum holds
inline F byte_of_lane(const uint8_t* line, int shift, int mask) {
  F r; MDI_LANES(uint32_t word; std::memcpy(&word, line + 4 * i, 4); r.v[i] = (float)((word >> shift) & (uint32_t)mask)) return r;
}

inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  float x;
  if (exponent == 0) {
    x = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
    uint32_t bits; std::memcpy(&bits, &x, 4); bits |= sign; std::memcpy(&x, &bits, 4);
    return x;
  }
  uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t float_to_half(float x) {  // to the nearest, ties to even
  uint32_t bits; std::memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {
    float magnitude; std::memcpy(&magnitude, &bits, 4);
    return (uint16_t)(sign | (uint32_t)(int32_t)__builtin_nearbyintf(magnitude * 16777216.0f));
  }
  return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}
inline F load_exponents(const uint8_t* p) {
  F r; MDI_LANES(uint32_t bits = (uint32_t)p[i] << 23; std::memcpy(&r.v[i], &bits, 4)) return r;
}
inline float bf16_to_float(uint16_t h) { uint32_t bits = (uint32_t)h << 16; float x; std::memcpy(&x, &bits, 4); return x; }
inline F load_half(const uint16_t* p) { F r; MDI_LANES(r.v[i] = half_to_float(p[i])) return r; }
inline void store_half(uint16_t* p, F a) { MDI_LANES(p[i] = float_to_half(a.v[i])) }
inline F load_bf16(const uint16_t* p) { F r; MDI_LANES(r.v[i] = bf16_to_float(p[i])) return r; }
inline F bf16_first(const uint8_t* line) { F r; MDI_LANES(uint16_t h; std::memcpy(&h, line + 4 * i, 2); r.v[i] = bf16_to_float(h)) return r; }
inline F bf16_second(const uint8_t* line) { F r; MDI_LANES(uint16_t h; std::memcpy(&h, line + 4 * i + 2, 2); r.v[i] = bf16_to_float(h)) return r; }

inline float sum(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float largest(F a) { float m = a.v[0]; MDI_LANES(m = a.v[i] > m ? a.v[i] : m) return m; }

inline void prefetch(const void*) {}

#undef MDI_LANES
}  // namespace MDI_NS
