// What each instruction set offers to api.cpp.
#pragma once
#include "exchange.h"
#include "model.h"
#include "team.h"

struct InstructionSet {
  const char* name;
  void* (*new_scratch)();
  void (*delete_scratch)(void*);
  void (*forward)(const MdiStage&, const MdiFrame&, Team&, void* scratch);
  // A piece of one block, see MdiPiece.
  void (*half)(const MdiStage&, int block, int half, const MdiFrame&, float* y, Team&, void* scratch);
  // The same, with its norm behind and added to the frame's rows: all halves one after the other are `forward`.
  void (*step)(const MdiStage&, int block, int half, const MdiFrame&, Team&, void* scratch);
  // The second half of a block with experts: all but the experts, then these in rising order, the last call with `end` the last.
  void (*route)(const MdiStage&, int block, const MdiFrame&, int32_t* choice, Team&, void* scratch);
  void (*some_experts)(const MdiStage&, int block, int first, int end, const MdiFrame&, Team&, void* scratch);
  // The same blocks by a group of nodes, of which each has a share: phases [at, stop), of which each block has six (stage.h). y and
  // z (n_rows, n_embd) keep what was computed. Ends early, with `at` there, where a sum is due that `mesh` cannot do.
  void (*shared)(const MdiStage&, const MdiFrame&, float* y, float* z, MdiMesh* mesh, int32_t& at, int32_t stop, Team&,
                 void* scratch);
  // Norm, if it has a weight, then a matrix, then a cap unless it is 0: x (n, n_in) -> y (n, n_out).
  void (*linear)(const MdiNorm&, const MdiMatrix&, float softcap, const float* x, int n, float* y, Team&, void* scratch);
  // functions.h over n numbers: 0 exp, 1 tanh, 2 erf, 3 to 6 the activations. For tests.
  void (*function)(int which, const float* x, int64_t n, float* y);
  // Rows of 16 outputs per panel, of `width` inputs in whole records -> the panels; factors: see layout.py.
  void (*pack_int4)(const float* rows, int n_panels, int width, const float* factors, int n_factors, uint8_t* to);
};

// Those that were compiled: the build defines MDI_HAS_... for each.
extern const InstructionSet *const kAmx, *const kAvx512, *const kAvx2Vnni, *const kAvx2, *const kNeonI8mm, *const kNeonDot, *const kNeon, *const kPlain;
