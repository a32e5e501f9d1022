// Products with weights in the block types of GGUF files (block_types.h), whose numbers are those of the file. A few inputs of a
// panel at a time are brought into lines of bytes and scales in floats, the same for all types, which all rows are multiplied by.
#pragma once
#include "block_types.h"

namespace MDI_NS {

inline int64_t block_panel_bytes(const MdiMatrix& w, int format) {
  RecordShape shape = record_shape(format);
  return (int64_t)padded(w.n_in, 64 * shape.steps) / (64 * shape.steps) * shape.bytes;
}

// The numbers of IQ4_NL and IQ4_XS, plus 128.
alignas(16) static const uint8_t kTablePlus128[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) static const int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <int kFormat> constexpr int kNarrowLines =
    block_type(kFormat).bits == 8 || block_type(kFormat).has_table ? 0 : narrow_lines(block_type(kFormat).bits);
template <int kFormat> constexpr bool kKeepsOffset = kDotIsUnsigned || kNarrowLines<kFormat> > 0;  // until products are summed

// Four inputs of all outputs, as dot() wants them, or dot_halves() where sums are narrow.
template <int kFormat, int kStep, int kPieceOfStep>
inline W piece_of(const uint8_t* words) {
  constexpr BlockType t = block_type(kFormat);
  constexpr Place at = place_of(kFormat, kStep, kPieceOfStep);
  const uint8_t* line = words + 64 * at.low;
  if constexpr (t.order == Order::kBytes) return int8_line(line);
  W w = at.half ? high_halves(load_line(line)) : low_halves(load_line(line));
  if constexpr (t.has_table) return looked_up(w, kDotIsUnsigned ? kTablePlus128 : (const uint8_t*)kTable);
  if constexpr (t.bits > 4) w = either(w, bits_of<at.shift - 4>(load_line(words + 64 * at.high), t.bits == 5 ? 16 : 48));
  if constexpr (t.offset > 0 && !kKeepsOffset<kFormat>) w = less(w, t.offset);
  return w;
}

// 256 inputs of a panel.
struct alignas(64) Decoded {
  uint8_t line[64][64];
  float scale[16][16];
  float more[8][16];  // of types with a minimum: what is added to each weight of a group
};

// Scales of the groups of a record.
template <int kFormat>
inline void decode_scales(const uint8_t* record, float (*scale)[16], float (*more)[16]) {
  constexpr BlockType t = block_type(kFormat);
  const uint16_t* halves = (const uint16_t*)record;
  if constexpr (t.inputs == 32) {
    for (int b = 0; b < 2; b++) {
      store(scale[b], load_half(halves + 16 * t.halves * b));
      if constexpr (t.has_minimum) store(more[b], load_half(halves + 16 * t.halves * b + 16));
    }
    return;
  }
  F d = load_half(halves);
  const uint8_t* bytes = record + 32 * t.halves;
  if constexpr (kFormat == kQ6_k)
    for (int g = 0; g < 16; g++) store(scale[g], mul(d, load_bytes((const int8_t*)bytes + 16 * g)));
  alignas(64) uint8_t six[16][16];  // bits
  if constexpr (kFormat == kQ4_k || kFormat == kQ5_k) {
    W first = load_line(bytes), second = load_line(bytes + 64), third = load_line(bytes + 128);
    store_line(six[0], bits_of<0>(first, 63));
    store_line(six[4], either(low_halves(third), bits_of<2>(first, 48)));
    store_line(six[8], bits_of<0>(second, 63));
    store_line(six[12], either(high_halves(third), bits_of<2>(second, 48)));
    F minus = sub(splat(0.0f), load_half(halves + 16));
    for (int g = 0; g < 8; g++) {
      store(scale[g], mul(d, load_bytes((const int8_t*)six[g])));
      store(more[g], mul(minus, load_bytes((const int8_t*)six[8 + g])));
    }
  }
  if constexpr (kFormat == kIq4_xs)
    for (int g = 0; g < 8; g++) {
      const uint8_t *high = bytes + 16 * (g / 4), *low = bytes + 32 + 16 * (g / 2);
      for (int o = 0; o < 16; o++)
        six[g][o] = (uint8_t)((low[o] >> g % 2 * 4 & 15) | (high[o] >> g % 4 * 2 & 3) << 4);
      store(scale[g], mul(d, sub(load_bytes((const int8_t*)six[g]), splat(32.0f))));
    }
}

// Steps whose words lie one after the other, with nothing of another step in them.
template <int kFormat> constexpr bool kAreStepsAlike = record_shape(kFormat).steps == 4 && block_type(kFormat).bits == 4;

// Asks for words ahead, a line with each piece: all of a record at once would stand in each other's way.
template <int kFormat, int kStep, int kPieceOfStep>
inline void ask_ahead(const uint8_t* words) {
  constexpr int each = record_shape(kFormat).blocks * block_type(kFormat).words / record_shape(kFormat).steps;  // of a step
  if constexpr (kPieceOfStep < each) prefetch(words + 64 * (each * kStep + kPieceOfStep) + kAhead);
}

template <int kFormat, int kStep, int kPieceOfStep = 0>
inline void decode_step(const uint8_t* words, uint8_t (*line)[64]) {
  if constexpr (kPieceOfStep < 16) {
    ask_ahead<kFormat, kStep, kPieceOfStep>(words);
    store_line(line[kPieceOfStep], piece_of<kFormat, kStep, kPieceOfStep>(words));
    decode_step<kFormat, kStep, kPieceOfStep + 1>(words, line);
  }
}

template <int kFormat, int kStep = 0>
inline void decode_steps(const uint8_t* words, uint8_t (*line)[64]) {
  if constexpr (kAreStepsAlike<kFormat>) {
    for (int step = 0; step < 4; step++) decode_step<kFormat, 0>(words + 512 * step, line + 16 * step);
  } else if constexpr (kStep < record_shape(kFormat).steps) {
    decode_step<kFormat, kStep>(words, line + 16 * kStep);
    decode_steps<kFormat, kStep + 1>(words, line);
  }
}

// Up to four steps of a panel, from the first one of a record on.
template <int kFormat>
void decode(const uint8_t* panel, int first_step, int n_steps, Decoded& to) {
  constexpr RecordShape shape = record_shape(kFormat);
  constexpr int groups = 64 * shape.steps / block_type(kFormat).group;
  const uint8_t* record = panel + (int64_t)(first_step / shape.steps) * shape.bytes;
  for (int i = 0; i * shape.steps < n_steps; i++, record += shape.bytes) {
    for (int at = 0; at < shape.header; at += 64) prefetch(record + at + kAhead);
    decode_scales<kFormat>(record, to.scale + i * groups, to.more + i * groups);
    decode_steps<kFormat>(record + shape.header, to.line + 16 * shape.steps * i);
  }
}

constexpr int kRowsAtOnce = 96;  // whole tiles of every instruction set

// The sixteen weights of input k of a record, whose scales are decoded already.
template <int kFormat>
inline F weights_of(const uint8_t* record, uint32_t k, const float (*scale)[16], const float (*more)[16]) {
  constexpr BlockType t = block_type(kFormat);
  const uint8_t* words = record + record_shape(kFormat).header;
  Place at = place_of(kFormat, k / 64, k % 64 / 4);
  int first_bit = k % 4 * 8;
  F q;
  if (t.bits == 8) q = byte_of_lane(words + 64 * at.low, first_bit, 255);
  else q = byte_of_lane(words + 64 * at.low, first_bit + 4 * at.half, 15);
  if (t.bits > 4 && t.bits < 8) {
    F high = byte_of_lane(words + 64 * at.high, first_bit + at.shift, t.bits == 5 ? 1 : 3);
    q = add(q, mul(high, splat(16.0f)));
  }
  if (t.has_table) {
    alignas(64) float lane[16];
    store(lane, q);
    for (float& a : lane) a = kTable[(int)a];
    q = load(lane);
  } else {
    q = sub(q, splat((float)t.offset));
  }
  F w = mul(q, load(scale[k / t.group]));
  return t.has_minimum ? add(w, load(more[k / t.group])) : w;
}

// Adds to a panel's sums with the rows [first, last), 16 floats each and `stride` apart, what the rows' large numbers add. Record by
// record, so that its scales are decoded once for all rows; each row takes its large numbers in their order.
template <int kFormat>
void add_large_of(const uint8_t* panel, const ByteRows& x, int first, int last, float* sums, int stride) {
  constexpr RecordShape shape = record_shape(kFormat);
  constexpr uint32_t each = 64 * shape.steps;
  const Large *next[kRowsAtOnce], *end[kRowsAtOnce];
  for (int m = first; m < last; m++) next[m - first] = x.large_of(m), end[m - first] = next[m - first] + x.n_large.data()[m];
  alignas(64) float scale[16][16], more[8][16];
  for (uint32_t begin = 0; begin < (uint32_t)x.width; begin += each, panel += shape.bytes) {
    bool is_decoded = false;
    for (int m = 0; m < last - first; m++) {
      float* sum = sums + (int64_t)m * stride;
      for (; next[m] != end[m] && next[m]->input < begin + each; next[m]++) {
        if (!is_decoded) decode_scales<kFormat>(panel, scale, more);
        is_decoded = true;
        store(sum, fma(weights_of<kFormat>(panel, next[m]->input - begin, scale, more), splat(next[m]->value), load(sum)));
      }
    }
  }
}

// What a tile reads of the rows of a block from its row `m` on: `n` is the block's number of rows.
struct ChunkRows {
  const int8_t* q;
  const float *scale, *float_sums;
  const int32_t *sums, *quarters;
  int n;
};
inline ChunkRows chunk_rows(const ByteRows& x, const RowBlock& block, int m, int step) {
  int n = block.n, b = block.first;
  return {x.bytes(b) + (int64_t)step * 64 * n + kPiece * m, x.scales(b) + step * n + m, x.float_sums(b) + 2 * step * n + m,
          x.sums(b) + 2 * step * n + m, x.quarters(b) + 4 * step * n + m, n};
}

#ifdef MDI_NEON
}  // namespace MDI_NS
#include "neon_blocks.h"
namespace MDI_NS {
#else

// totals (kRows, kBytePanels, 16) += products of the rows with up to 256 inputs of panels side by side. Within a step of 64
// inputs, which share a scale of activations, group by group: the whole number times the scale, and the sum of activations times
// `more`. Asking here for the weights that follow made 64 rows 1.6 times slower.
template <int kRows, int kGroupInputs, bool kHasMinimum, int kNarrow>
void multiply_chunk(const Decoded* w, int n_steps, const ChunkRows& x, int offset, float* totals, bool) {
  constexpr int kPanels = kBytePanels, kLines = kGroupInputs / 4, kGroups = 64 / kGroupInputs;
  int n = x.n;
  F total[kRows][kPanels];
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) total[m][p] = load(totals + 16 * (m * kPanels + p));
  const int8_t* q = x.q;
  const float *scale = x.scale, *float_sums = x.float_sums;
  const int32_t* sums = kGroupInputs == 32 ? x.sums : x.quarters;
  for (int step = 0; step < n_steps; step++) {
    F part[kRows][kPanels];
    #pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) part[m][p] = splat(0.0f);
    for (int g = 0; g < kGroups; g++) {
      I whole[kRows][kPanels];
      #pragma GCC unroll 8
      for (int m = 0; m < kRows; m++)
        #pragma GCC unroll 8
        for (int p = 0; p < kPanels; p++) whole[m][p] = splat_int(kDotIsUnsigned || kNarrow ? -offset * sums[m] : 0);
      const uint8_t* line = w->line[16 * step + kLines * g];
      if constexpr (!kNarrow) {
#pragma GCC unroll kUnrolled
        for (int i = 0; i < kLines; i++) {
          W v[kPanels];
          #pragma GCC unroll 8
          for (int p = 0; p < kPanels; p++) v[p] = load_line(line + p * sizeof(Decoded) + 64 * i);
          #pragma GCC unroll 8
          for (int m = 0; m < kRows; m++)
            #pragma GCC unroll 8
            for (int p = 0; p < kPanels; p++) whole[m][p] = dot(whole[m][p], v[p], q + 4 * (i * n + m));
        }
      } else {
        for (int first = 0; first < kLines; first += kNarrow) {
          H sum[kRows][kPanels];
          #pragma GCC unroll 8
          for (int m = 0; m < kRows; m++)
            #pragma GCC unroll 8
            for (int p = 0; p < kPanels; p++) sum[m][p] = begin_halves(0);
#pragma GCC unroll kUnrolled
          for (int i = first; i < first + kNarrow; i++) {
            W v[kPanels];
            #pragma GCC unroll 8
            for (int p = 0; p < kPanels; p++) v[p] = load_line(line + p * sizeof(Decoded) + 64 * i);
            #pragma GCC unroll 8
            for (int m = 0; m < kRows; m++)
              #pragma GCC unroll 8
              for (int p = 0; p < kPanels; p++) sum[m][p] = dot_halves(sum[m][p], v[p], q + 4 * (i * n + m));
          }
          #pragma GCC unroll 8
          for (int m = 0; m < kRows; m++)
            #pragma GCC unroll 8
            for (int p = 0; p < kPanels; p++) whole[m][p] = end_halves(sum[m][p], whole[m][p]);
        }
      }
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) {
        F s = load(w[p].scale[step * kGroups + g]);
        #pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) part[m][p] = fma(to_float(whole[m][p]), s, part[m][p]);
        if constexpr (kHasMinimum) {
          F more = load(w[p].more[step * kGroups + g]);
          #pragma GCC unroll 8
          for (int m = 0; m < kRows; m++) part[m][p] = fma(more, splat(float_sums[m]), part[m][p]);
        }
      }
      q += 4 * kLines * n, sums += n;
      if constexpr (kHasMinimum) float_sums += n;
    }
    #pragma GCC unroll 8
    for (int m = 0; m < kRows; m++)
      #pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) total[m][p] = fma(part[m][p], splat(scale[m]), total[m][p]);
    scale += n;
  }
  #pragma GCC unroll 8
  for (int m = 0; m < kRows; m++)
    #pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) store(totals + 16 * (m * kPanels + p), total[m][p]);
}
#endif

#ifdef MDI_AMX
}  // namespace MDI_NS
#include "amx_blocks.h"
namespace MDI_NS {
#endif

#ifdef MDI_ONE_ROW
// Sums of one row, without a detour of the weights through memory, in the order of multiply_chunk.

template <int kFormat, int kStep, int kPieceOfStep, int kLeft>
inline H add_narrow(const uint8_t* words, const int8_t* q, H sum) {
  if constexpr (kLeft > 0) {
    ask_ahead<kFormat, kStep, kPieceOfStep>(words);
    sum = dot_halves(sum, piece_of<kFormat, kStep, kPieceOfStep>(words), q + 4 * kPieceOfStep);
    return add_narrow<kFormat, kStep, kPieceOfStep + 1, kLeft - 1>(words, q, sum);
  }
  return sum;
}

template <int kFormat, int kStep, int kFirst, int kPieceOfGroup = 0>
inline I add_group(const uint8_t* words, const int8_t* q, I sum) {
  constexpr int kLines = block_type(kFormat).group / 4, kPieceOfStep = kFirst + kPieceOfGroup;
  if constexpr (kPieceOfGroup == kLines) {
    return sum;
  } else if constexpr (kNarrowLines<kFormat> == 0) {
    ask_ahead<kFormat, kStep, kPieceOfStep>(words);
    sum = dot(sum, piece_of<kFormat, kStep, kPieceOfStep>(words), q + 4 * kPieceOfStep);
    return add_group<kFormat, kStep, kFirst, kPieceOfGroup + 1>(words, q, sum);
  } else {
    H few = add_narrow<kFormat, kStep, kPieceOfStep, kNarrowLines<kFormat>>(words, q, begin_halves(0));
    return add_group<kFormat, kStep, kFirst, kPieceOfGroup + kNarrowLines<kFormat>>(words, q, end_halves(few, sum));
  }
}

template <int kFormat, int kStep, int kGroupOfStep = 0>
inline F add_groups(const uint8_t* words, const float (*scale)[16], const float (*more)[16], const ChunkRows& x, F part) {
  constexpr BlockType t = block_type(kFormat);
  if constexpr (kGroupOfStep < 64 / t.group) {
    constexpr int g = kStep * (64 / t.group) + kGroupOfStep;
    int32_t sum = t.group == 32 ? x.sums[g] : x.quarters[g];
    I whole = add_group<kFormat, kStep, kGroupOfStep * (t.group / 4)>(words, x.q + 64 * kStep,
                                                                     splat_int(kKeepsOffset<kFormat> ? -t.offset * sum : 0));
    part = fma(to_float(whole), load(scale[g]), part);
    if constexpr (t.has_minimum) part = fma(load(more[g]), splat(x.float_sums[g]), part);
    return add_groups<kFormat, kStep, kGroupOfStep + 1>(words, scale, more, x, part);
  }
  return part;
}

template <int kFormat, int kStep = 0>
inline F add_steps(const uint8_t* words, int n_steps, const float (*scale)[16], const float (*more)[16], const ChunkRows& x,
                   F total) {
  if constexpr (kAreStepsAlike<kFormat>) {
    for (int i = 0; i < 4 && i < n_steps; i++) {
      ChunkRows of_step = {x.q + 64 * i, x.scale + i, x.float_sums + 2 * i, x.sums + 2 * i, x.quarters + 4 * i, 1};
      F part = add_groups<kFormat, 0>(words + 512 * i, scale + 2 * i, more + 2 * i, of_step, splat(0.0f));
      total = fma(part, splat(*of_step.scale), total);
    }
  } else if constexpr (kStep < record_shape(kFormat).steps) {
    if (kStep < n_steps) {
      F part = add_groups<kFormat, kStep>(words, scale, more, x, splat(0.0f));
      return add_steps<kFormat, kStep + 1>(words, n_steps, scale, more, x, fma(part, splat(x.scale[kStep]), total));
    }
  }
  return total;
}

template <int kFormat>
void multiply_one(const uint8_t* panel, int n_steps, const ByteRows& x, float* to) {
  constexpr RecordShape shape = record_shape(kFormat);
  F total = splat(0.0f);
  alignas(64) float scale[16][16], more[8][16];
  for (int step = 0; step < n_steps; step += shape.steps, panel += shape.bytes) {
    for (int at = 0; at < shape.header; at += 64) prefetch(panel + at + kAhead);
    decode_scales<kFormat>(panel, scale, more);
    ChunkRows row = chunk_rows(x, RowBlock(0, 1, 1), 0, step);
    total = add_steps<kFormat>(panel + shape.header, n_steps - step, scale, more, row, total);
  }
  store(to, total);
}
#endif

constexpr int kChunkSteps = 4;

// The rows of a block that one chunk of weights is multiplied by, in as few pieces as there are sizes of tiles.
template <int kRows, int kGroupInputs, bool kHasMinimum, int kNarrow>
inline void multiply_rows(const Decoded* w, int n_steps, const ByteRows& x, const RowBlock& block, int m, int step, int offset,
                          float* totals, bool is_last) {
  for (; block.n - m >= kRows; m += kRows, totals += 16 * kRows * kBytePanels)
    multiply_chunk<kRows, kGroupInputs, kHasMinimum, kNarrow>(w, n_steps, chunk_rows(x, block, m, step), offset, totals, is_last);
  if constexpr (kRows > 1)
    multiply_rows<(kRows > 4 ? 4 : kRows / 2), kGroupInputs, kHasMinimum, kNarrow>(w, n_steps, x, block, m, step, offset, totals,
                                                                                   is_last);
}

struct Functions {  // of a type
  void (*decode)(const uint8_t* panel, int first_step, int n_steps, Decoded& to);
  void (*add_large)(const uint8_t* panel, const ByteRows& x, int first, int last, float* sums, int stride);
  void (*multiply_one)(const uint8_t* panel, int n_steps, const ByteRows& x, float* total);  // or null
};

template <int kGroupInputs, bool kHasMinimum, int kNarrow>
void block_products(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out, const Functions& of) {
  constexpr int kPanels = kBytePanels;
  int offset = block_type(w.format).offset, n_steps = padded(w.n_in, 64) / 64;
  int64_t panel_bytes = block_panel_bytes(w, w.format);
  Decoded decoded[kPanels];
  alignas(64) float totals[kRowsAtOnce * kPanels * 16];
#ifdef MDI_AMX
  MatrixUnit unit(x.for_matrix_unit, kGroupInputs);
#endif
  for (int panel = first; panel < last; panel += kPanels) {
    int n_panels = last - panel < kPanels ? last - panel : kPanels;
    const uint8_t* start = w.data + panel * panel_bytes;
    if (n_rows == 1 && of.multiply_one) {
      for (int p = 0; p < n_panels; p++) {
        of.multiply_one(start + p * panel_bytes, n_steps, x, totals);
        if (x.n_large.data()[0]) of.add_large(start + p * panel_bytes, x, 0, 1, totals, 16);
        finish(load(totals), w, panel + p, out, 0);
      }
      continue;
    }
    for (int m0 = 0; m0 < n_rows; m0 += kRowsAtOnce) {
      int end = n_rows - m0 < kRowsAtOnce ? n_rows : m0 + kRowsAtOnce;
      std::memset(totals, 0, sizeof(float) * 16 * kPanels * (size_t)padded(end - m0, x.for_matrix_unit ? kMatrixBlock : 1));
      for (int step = 0; step < n_steps; step += kChunkSteps) {
        int n = n_steps - step < kChunkSteps ? n_steps - step : kChunkSteps;
        for (int p = 0; p < n_panels; p++) of.decode(start + p * panel_bytes, step, n, decoded[p]);
        if constexpr (kPanels > 1)
          if (n_panels == 1) std::memcpy(&decoded[1], &decoded[0], sizeof(Decoded));  // whose products nobody reads
        for (int m = m0; m < end;) {
          RowBlock block = x.block_of(m);
          float* to = totals + (m - m0) * kPanels * 16;
#ifdef MDI_AMX
          if (x.for_matrix_unit) matrix_chunk<kGroupInputs, kHasMinimum>(decoded, n, x, m, step, offset, to);
          else
#endif
          multiply_rows<tile_rows(kQ8_0), kGroupInputs, kHasMinimum, kNarrow>(decoded, n, x, block, 0, step, offset, to,
                                                                            step + n == n_steps);
          m += block.n;
        }
      }
      for (int p = 0; p < n_panels; p++)
        of.add_large(start + p * panel_bytes, x, m0, end, totals + 16 * p, 16 * kPanels);
      for (int m = m0; m < end; m++)
        for (int p = 0; p < n_panels; p++) finish(load(totals + ((m - m0) * kPanels + p) * 16), w, panel + p, out, m);
    }
  }
}

template <int kFormat>
inline void block_panels(const MdiMatrix& w, int first, int last, const ByteRows& x, int n_rows, const Out& out) {
  constexpr BlockType t = block_type(kFormat);
#ifdef MDI_ONE_ROW
  const Functions of = {decode<kFormat>, add_large_of<kFormat>, multiply_one<kFormat>};
#else
  const Functions of = {decode<kFormat>, add_large_of<kFormat>, nullptr};
#endif
  block_products<t.group, t.has_minimum, kNarrowLines<kFormat>>(w, first, last, x, n_rows, out, of);
}

}  // namespace MDI_NS
