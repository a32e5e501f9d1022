// Included once per instruction set, with MDI_NS, MDI_NAME and MDI_TABLE defined and its vec_*.h included.
#include "isa.h"
#include "pack.h"
#include "stage.h"

namespace MDI_NS {

static void* new_scratch() { return new Scratch; }
static void delete_scratch(void* scratch) { delete (Scratch*)scratch; }

static void forward(const MdiStage& stage, const MdiFrame& frame, Team& team, void* scratch) {
  FloatMode mode;
  Runner(stage, frame, team, *(Scratch*)scratch).forward();
}

static void half(const MdiStage& stage, int block, int which, const MdiFrame& frame, float* y, Team& team, void* scratch) {
  FloatMode mode;
  Runner runner(stage, frame, team, *(Scratch*)scratch);
  const MdiBlock& own = stage.blocks[block];
  switch (which) {
    case kAttention: return runner.attention_half(own, frame.rows, y);
    case kMlp: return runner.mlp_half(own, frame.rows, y);
    case kProject: return runner.project(own, frame.rows, y);
    default: return runner.attend_heads(own, frame.rows, y);
  }
}

static void step(const MdiStage& stage, int block, int which, const MdiFrame& frame, Team& team, void* scratch) {
  FloatMode mode;
  Runner(stage, frame, team, *(Scratch*)scratch).step(block, which);
}

static void route(const MdiStage& stage, int block, const MdiFrame& frame, int32_t* choice, Team& team, void* scratch) {
  FloatMode mode;
  Runner(stage, frame, team, *(Scratch*)scratch).route(block, choice);
}

static void some_experts(const MdiStage& stage, int block, int first, int end, const MdiFrame& frame, Team& team, void* scratch) {
  FloatMode mode;
  Runner(stage, frame, team, *(Scratch*)scratch).some_experts(block, first, end);
}

static void shared(const MdiStage& stage, const MdiFrame& frame, float* y, float* z, MdiMesh* mesh, int32_t& at, int32_t stop,
                   Team& team, void* scratch) {
  FloatMode mode;
  Runner(stage, frame, team, *(Scratch*)scratch).run_phases(y, z, mesh, at, stop);
}

static void linear(const MdiNorm& norm, const MdiMatrix& w, float softcap, const float* x, int n, float* y, Team& team,
                   void* scratch) {
  FloatMode mode;
  Scratch& own = *(Scratch*)scratch;
  MdiStage stage{};
  MdiFrame frame{};
  if (norm.weight) {
    float* normed = own.normed.of((size_t)n * w.n_in);
    for (int m = 0; m < n; m++) normalize(norm, x + (int64_t)m * w.n_in, w.n_in, normed + (int64_t)m * w.n_in);
    x = normed;
  }
  Runner(stage, frame, team, own).multiply(w, x, n, y);
  if (softcap != 0)  // of logits
    for (int64_t i = 0; i < (int64_t)n * w.n_out; i += 16) {
      int rest = (int)((int64_t)n * w.n_out - i < 16 ? (int64_t)n * w.n_out - i : 16);
      F raw = load_part(y + i, rest);
      F capped = mul(tanh(div(sub(raw, sub(raw, raw)), splat(softcap))), splat(softcap));  // infinity is not hidden
      store_part(y + i, capped, rest);
    }
}

static void function(int which, const float* x, int64_t n, float* y) {
  FloatMode mode;
  for (int64_t i = 0; i < n; i += 16) {
    int rest = (int)(n - i < 16 ? n - i : 16);
    F a = load_part(x + i, rest);
    F b = which == 0 ? exp(a) : which == 1 ? tanh(a) : which == 2 ? erf(a) : activate(a, which - 3);
    store_part(y + i, b, rest);
  }
}

static void pack_int4(const float* rows, int n_panels, int width, const float* factors, int n_factors, uint8_t* to) {
  FloatMode mode;
  for (int64_t p = 0; p < n_panels; p++)
    pack_int4_panel(rows + p * 16 * width, width, factors, n_factors, to + p * (width / 64) * 9 * 64);
}

static const InstructionSet kSet = {MDI_NAME, new_scratch, delete_scratch, forward, half, step,
                                    route, some_experts, shared, linear, function, pack_int4};

}  // namespace MDI_NS

const InstructionSet* const MDI_TABLE = &MDI_NS::kSet;
