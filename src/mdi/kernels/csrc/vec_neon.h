// Sixteen lanes in four NEON registers; with MDI_DOT, products of bytes by the dot product instructions of ARMv8.2.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace MDI_NS {

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct W { uint8x16_t v[4]; };

constexpr int kTileRows = 4;
constexpr int kFloatPanels = 1;
constexpr int kBytePanels = 1;   // the same where weights are bytes
constexpr bool kDotIsUnsigned = false;

#define MDI_EACH(expression) for (int i = 0; i < 4; i++) { expression; }

inline F load(const float* p) { F r; MDI_EACH(r.v[i] = vld1q_f32(p + 4 * i)) return r; }
inline void store(float* p, F a) { MDI_EACH(vst1q_f32(p + 4 * i, a.v[i])) }
inline F splat(float x) { F r; MDI_EACH(r.v[i] = vdupq_n_f32(x)) return r; }
inline F add(F a, F b) { F r; MDI_EACH(r.v[i] = vaddq_f32(a.v[i], b.v[i])) return r; }
inline F sub(F a, F b) { F r; MDI_EACH(r.v[i] = vsubq_f32(a.v[i], b.v[i])) return r; }
inline F mul(F a, F b) { F r; MDI_EACH(r.v[i] = vmulq_f32(a.v[i], b.v[i])) return r; }
inline F div(F a, F b) { F r; MDI_EACH(r.v[i] = vdivq_f32(a.v[i], b.v[i])) return r; }
inline F fma(F a, F b, F c) { F r; MDI_EACH(r.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i])) return r; }
// As x86 does: the second one where one is no number.
inline F min(F a, F b) { F r; MDI_EACH(r.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])) return r; }
inline F max(F a, F b) { F r; MDI_EACH(r.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])) return r; }
inline F abs(F a) { F r; MDI_EACH(r.v[i] = vabsq_f32(a.v[i])) return r; }
inline F round(F a) { F r; MDI_EACH(r.v[i] = vrndnq_f32(a.v[i])) return r; }
inline F choose_greater(F a, F b, F x, F y) {
  F r; MDI_EACH(r.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), x.v[i], y.v[i])) return r;
}
inline F first_lanes(F a, int n, F other) {
  static const int32_t numbers[4] = {0, 1, 2, 3};
  int32x4_t lane = vld1q_s32(numbers);
  F r; MDI_EACH(r.v[i] = vbslq_f32(vcgtq_s32(vdupq_n_s32(n - 4 * i), lane), a.v[i], other.v[i])) return r;
}

inline I splat_int(int32_t x) { I r; MDI_EACH(r.v[i] = vdupq_n_s32(x)) return r; }
inline I to_int(F a) { I r; MDI_EACH(r.v[i] = vcvtnq_s32_f32(a.v[i])) return r; }
inline F to_float(I a) { F r; MDI_EACH(r.v[i] = vcvtq_f32_s32(a.v[i])) return r; }
inline F power_of_two(I n) {
  F r; MDI_EACH(r.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23))) return r;
}
inline void store_bytes(int8_t* p, I a) {
  int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline F load_bytes(const int8_t* p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline int32_t sum_int(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }

inline W load_line(const uint8_t* p) { W r; MDI_EACH(r.v[i] = vld1q_u8(p + 16 * i)) return r; }
inline W int8_line(const uint8_t* p) { W r; MDI_EACH(r.v[i] = veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(0x80))) return r; }
inline W low_halves(W a) { W r; MDI_EACH(r.v[i] = vandq_u8(a.v[i], vdupq_n_u8(15))) return r; }
inline W high_halves(W a) { W r; MDI_EACH(r.v[i] = vshrq_n_u8(a.v[i], 4)) return r; }
inline W looked_up(W a, const uint8_t* table) { W r; uint8x16_t t = vld1q_u8(table); MDI_EACH(r.v[i] = vqtbl1q_u8(t, a.v[i])) return r; }
inline int32x4_t dot_register(int32x4_t sum, int8x16_t w, int8x16_t x) {
#ifdef MDI_DOT
  return vdotq_s32(sum, w, x);
#else
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);  // products of 16 bits
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
inline I dot(I sum, W w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  int8x16_t bytes = vreinterpretq_s8_s32(vdupq_n_s32(four));
  MDI_EACH(sum.v[i] = dot_register(sum.v[i], vreinterpretq_s8_u8(w.v[i]), bytes))
  return sum;
}
inline I dot_halves(I sum, W w, const int8_t* x) { return dot(sum, w, x); }
inline F byte_of_lane(const uint8_t* line, int shift, int mask) {
  F r;
  MDI_EACH(uint32x4_t word = vreinterpretq_u32_u8(vld1q_u8(line + 16 * i));
           r.v[i] = vcvtq_f32_u32(vandq_u32(vshlq_u32(word, vdupq_n_s32(-shift)), vdupq_n_u32((uint32_t)mask))))
  return r;
}

inline F load_half(const uint16_t* p) {
  F r; MDI_EACH(r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))) return r;
}
inline void store_half(uint16_t* p, F a) { MDI_EACH(vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])))) }
inline F load_exponents(const uint8_t* p) {
  uint8x16_t e = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(e)), high = vmovl_u8(vget_high_u8(e));
  uint16x4_t parts[4] = {vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)};
  F r; MDI_EACH(r.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(parts[i]), 23))) return r;
}
inline F load_bf16(const uint16_t* p) {
  F r; MDI_EACH(r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))) return r;
}
inline F bf16_first(const uint8_t* line) {
  F r; MDI_EACH(r.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(vld1q_u8(line + 16 * i)), 16))) return r;
}
inline F bf16_second(const uint8_t* line) {
  F r;
  MDI_EACH(r.v[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(vld1q_u8(line + 16 * i)), vdupq_n_u32(0xffff0000))))
  return r;
}

inline float sum(F a) {
  float32x4_t c = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t d = vadd_f32(vget_low_f32(c), vget_high_f32(c));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float largest(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }

inline void prefetch(const void* p) { __builtin_prefetch(p); }

#undef MDI_EACH
}  // namespace MDI_NS
