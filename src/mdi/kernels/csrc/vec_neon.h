// Sixteen lanes in four NEON registers; neon.h has products of bytes, with MDI_DOT by the dot product instructions of ARMv8.2.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "model.h"

#define MDI_NEON

namespace MDI_NS {

// Members and no arrays: gcc 12 keeps arrays of registers on the stack, which made these kernels three times slower.
struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };
struct W { uint8x16_t a, b, c, d; };

#if defined(MDI_I8MM)
constexpr int tile_rows(int format) { return format >= kInt8 && format != kMxfp4 ? 8 : 4; }
#elif defined(MDI_DOT)
constexpr int tile_rows(int) { return 4; }
#else
constexpr int tile_rows(int format) { return format >= kInt8 ? 2 : 4; }  // sums of pairs of bytes take twice the registers
#endif
constexpr int kFloatPanels = 1;
constexpr int kBytePanels = 1;   // the same where weights are bytes
constexpr int kPiece = 8;        // inputs of a row that lie together in its block
constexpr int kSums = 4;         // sums of attention that stay in registers
constexpr bool kDotIsUnsigned = false;
constexpr int narrow_lines(int) { return 0; }

// A vector of what `f` makes of the registers of each of `x`.
template <typename R, typename Function, typename... T>
inline __attribute__((always_inline)) R each(Function f, T... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
#define MDI_EACH(R, parameters, expression, ...) return each<R>([=] parameters { return expression; }, __VA_ARGS__)

using V = float32x4_t;
using N = int32x4_t;
using B = uint8x16_t;

inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F x) {
  vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
inline F splat(float x) { V v = vdupq_n_f32(x); return {v, v, v, v}; }
inline F add(F x, F y) { MDI_EACH(F, (V p, V q), vaddq_f32(p, q), x, y); }
inline F sub(F x, F y) { MDI_EACH(F, (V p, V q), vsubq_f32(p, q), x, y); }
inline F mul(F x, F y) { MDI_EACH(F, (V p, V q), vmulq_f32(p, q), x, y); }
inline F div(F x, F y) { MDI_EACH(F, (V p, V q), vdivq_f32(p, q), x, y); }
inline F fma(F x, F y, F z) { MDI_EACH(F, (V p, V q, V r), vfmaq_f32(r, p, q), x, y, z); }
// As x86 does: the second one where one is no number.
inline F min(F x, F y) { MDI_EACH(F, (V p, V q), vbslq_f32(vcltq_f32(p, q), p, q), x, y); }
inline F max(F x, F y) { MDI_EACH(F, (V p, V q), vbslq_f32(vcgtq_f32(p, q), p, q), x, y); }
inline F abs(F x) { MDI_EACH(F, (V p), vabsq_f32(p), x); }
inline F round(F x) { MDI_EACH(F, (V p), vrndnq_f32(p), x); }
inline F choose_greater(F x, F y, F yes, F no) {
  MDI_EACH(F, (V p, V q, V r, V s), vbslq_f32(vcgtq_f32(p, q), r, s), x, y, yes, no);
}
inline F first_lanes(F x, int n, F other) {
  static const int32_t numbers[4] = {0, 1, 2, 3};
  N lane = vld1q_s32(numbers);
  I left = {vdupq_n_s32(n), vdupq_n_s32(n - 4), vdupq_n_s32(n - 8), vdupq_n_s32(n - 12)};
  MDI_EACH(F, (V p, V q, N m), vbslq_f32(vcgtq_s32(m, lane), p, q), x, other, left);
}

inline I splat_int(int32_t x) { N v = vdupq_n_s32(x); return {v, v, v, v}; }
inline I to_int(F x) { MDI_EACH(I, (V p), vcvtnq_s32_f32(p), x); }
inline F to_float(I x) { MDI_EACH(F, (N p), vcvtq_f32_s32(p), x); }
inline F power_of_two(I x) {
  MDI_EACH(F, (N p), vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(p, vdupq_n_s32(127)), 23)), x);
}
inline void store_bytes(int8_t* p, I x) {
  int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
  int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline F load_bytes(const int8_t* p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
inline int32_t sum_int(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }

inline W load_line(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline W int8_line(const uint8_t* p) { MDI_EACH(W, (B r), veorq_u8(r, vdupq_n_u8(0x80)), load_line(p)); }
inline W low_halves(W w) { MDI_EACH(W, (B r), vandq_u8(r, vdupq_n_u8(15)), w); }
inline W high_halves(W w) { MDI_EACH(W, (B r), vshrq_n_u8(r, 4), w); }
inline W looked_up(W w, const uint8_t* table) { B t = vld1q_u8(table); MDI_EACH(W, (B r), vqtbl1q_u8(t, r), w); }
template <int kRight> inline W bits_of(W w, int mask) {
  B m = vdupq_n_u8((uint8_t)mask);
  MDI_EACH(W, (B r), vandq_u8(vshlq_u8(r, vdupq_n_s8(-kRight)), m), w);
}
inline W either(W x, W y) { MDI_EACH(W, (B r, B s), vorrq_u8(r, s), x, y); }
inline W less(W w, int n) { MDI_EACH(W, (B r), vsubq_u8(r, vdupq_n_u8((uint8_t)n)), w); }  // of each byte
inline void store_line(uint8_t* p, W w) { vst1q_u8(p, w.a), vst1q_u8(p + 16, w.b), vst1q_u8(p + 32, w.c), vst1q_u8(p + 48, w.d); }
inline F byte_of_lane(const uint8_t* line, int shift, int mask) {
  MDI_EACH(F, (B p), vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(p), vdupq_n_s32(-shift)), vdupq_n_u32((uint32_t)mask))),
           load_line(line));
}

inline V half_register(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F load_half(const uint16_t* p) { return {half_register(p), half_register(p + 4), half_register(p + 8), half_register(p + 12)}; }
inline void store_half_register(uint16_t* p, V x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store_half(uint16_t* p, F x) {
  store_half_register(p, x.a), store_half_register(p + 4, x.b), store_half_register(p + 8, x.c), store_half_register(p + 12, x.d);
}
inline F load_exponents(const uint8_t* p) {
  uint8x16_t e = vld1q_u8(p);
  uint16x8_t low = vshll_n_u8(vget_low_u8(e), 7), high = vshll_n_u8(vget_high_u8(e), 7);
  struct { uint16x4_t a, b, c, d; } parts = {vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)};
  MDI_EACH(F, (uint16x4_t q), vreinterpretq_f32_u32(vshll_n_u16(q, 16)), parts);
}
inline V bf16_register(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline F load_bf16(const uint16_t* p) { return {bf16_register(p), bf16_register(p + 4), bf16_register(p + 8), bf16_register(p + 12)}; }
inline F bf16_first(const uint8_t* line) {
  MDI_EACH(F, (B p), vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(p), 16)), load_line(line));
}
inline F bf16_second(const uint8_t* line) {
  MDI_EACH(F, (B p), vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(p), vdupq_n_u32(0xffff0000))), load_line(line));
}

inline float sum(F x) {
  V e = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  float32x2_t f = vadd_f32(vget_low_f32(e), vget_high_f32(e));
  return vget_lane_f32(f, 0) + vget_lane_f32(f, 1);
}
inline float largest(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

// gcc 12 may take a call that it has not inlined at once for one that does nothing.
inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }

#undef MDI_EACH
}  // namespace MDI_NS
