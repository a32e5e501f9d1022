// The block types of GGUF files, and how packed weights hold them.
//
// A record has a block of 256 inputs, or two of 32, of each of the sixteen outputs of a panel: halves (two bytes each), then bytes,
// then words of four bytes, each of all outputs side by side, in the order of the file. What precedes the words fills whole lines.
// Two things are not as in the file: bytes of Q8_0 have an offset of 128, and of the fifth bits of Q5_0 and Q5_1 the word's byte k
// has those of inputs k, k + 4, and so on.
#pragma once
#include "model.h"

enum class Order {  // of the inputs of a block in its words
  kBytes,           // four in each
  kHalves,          // the first sixteen of 32 in the low halves of bytes, the others in the high ones
  kGroups,          // the first 32 of 64 in the low halves, the others in the high ones
  kDoubleGroups,    // the first 64 of 128 in the low halves, the others in the high ones
};

// A weight is d * scale * (q - offset), and + m or - dmin * m in types with a minimum.
struct BlockType {
  int inputs, halves, bytes, words;  // of a block
  int bits, group, offset;           // group: inputs that share a scale
  bool has_minimum, has_table;
  Order order;
};
constexpr BlockType kBlockTypes[] = {
    {32, 1, 0, 8, 8, 32, 128, false, false, Order::kBytes},           // Q8_0
    {32, 2, 0, 4, 4, 32, 0, true, false, Order::kHalves},             // Q4_1
    {32, 1, 0, 5, 5, 32, 16, false, false, Order::kHalves},           // Q5_0
    {32, 2, 0, 5, 5, 32, 0, true, false, Order::kHalves},             // Q5_1
    {256, 2, 12, 32, 4, 32, 0, true, false, Order::kGroups},          // Q4_K
    {256, 2, 12, 40, 5, 32, 0, true, false, Order::kGroups},          // Q5_K
    {256, 1, 16, 48, 6, 16, 32, false, false, Order::kDoubleGroups},  // Q6_K
    {32, 1, 0, 4, 4, 32, 128, false, true, Order::kHalves},           // IQ4_NL
    {256, 1, 6, 32, 4, 32, 128, false, true, Order::kHalves},         // IQ4_XS
};
constexpr const BlockType& block_type(int format) { return kBlockTypes[format - kQ8_0]; }

struct RecordShape {
  int blocks, steps;  // steps of 64 inputs
  int header, bytes;
};
constexpr RecordShape record_shape(int format) {
  const BlockType& t = block_type(format);
  int blocks = t.inputs == 32 ? 2 : 1, header = (16 * blocks * (2 * t.halves + t.bytes) + 63) / 64 * 64;
  return {blocks, blocks * t.inputs / 64, header, header + 64 * blocks * t.words};
}

// Where the words of a record have the four inputs of a piece, of which a step has sixteen.
struct Place {
  int low, half;     // line of the low four bits (of kBytes, of all), and which half of its bytes
  int high, shift;   // line of the others, and by how much they are shifted there
};
constexpr Place place_of(int format, int step, int piece) {
  const BlockType& t = block_type(format);
  int group = piece / 8, i = piece % 8;
  switch (t.order) {
    case Order::kBytes: return {piece, 0, 0, 0};
    case Order::kHalves: {
      int first = t.inputs == 32 ? group * t.words : 8 * step + 4 * group;
      return {first + (t.bits > 4) + i % 4, i / 4, first, i};
    }
    case Order::kGroups: return {(t.bits > 4 ? 8 : 0) + 8 * step + i, group, i, 2 * step + group};
    default: return {16 * (step / 2) + piece, step % 2, 32 + 8 * (step / 2) + i, 4 * (step % 2) + 2 * group};
  }
}
