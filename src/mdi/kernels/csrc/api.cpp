// The C interface. Lengths and pointers were checked by Python: nothing here looks at data that came from elsewhere.
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "isa.h"

std::vector<const InstructionSet*> instruction_sets();

static const InstructionSet* g_set = nullptr;

static const InstructionSet* chosen() {
  if (!g_set) g_set = instruction_sets().front();
  return g_set;
}

struct MdiContext {  // the threads and the memory with which one stage computes
  const InstructionSet* set;
  Team team;
  void* scratch;
  MdiContext(int n_threads, int spins) : set(chosen()), team(n_threads, spins), scratch(set->new_scratch()) {}
  ~MdiContext() { set->delete_scratch(scratch); }
};

#define MDI_API extern "C" __attribute__((visibility("default")))

MDI_API int mdi_abi_version(void) { return 2; }

MDI_API const char* mdi_instruction_set(void) { return chosen()->name; }

// Names of all that this machine can run, best first, with blanks between them.
MDI_API const char* mdi_instruction_sets(void) {
  static std::string names;
  if (names.empty())
    for (const InstructionSet* set : instruction_sets()) names += (names.empty() ? "" : " ") + std::string(set->name);
  return names.c_str();
}

// Contexts made from now on use this set, or the best one whose name begins so. Returns 0, or -1 if this machine has none.
MDI_API int mdi_force(const char* name) {
  for (size_t length : {std::strlen(name) + 1, std::strlen(name)})
    for (const InstructionSet* set : instruction_sets())
      if (std::strncmp(set->name, name, length) == 0) {
        g_set = set;
        return 0;
      }
  return -1;
}

MDI_API void* mdi_context_new(int n_threads, int spins) {
  try {
    return new MdiContext(n_threads, spins);
  } catch (...) {
    return nullptr;
  }
}

MDI_API void mdi_context_spins(void* context, int spins) { ((MdiContext*)context)->team.set_spins(spins); }

MDI_API void mdi_context_delete(void* context) { delete (MdiContext*)context; }

// 0, or -1 if there was not enough memory.
template <class Work>
static int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

MDI_API int mdi_forward(void* context, const MdiStage* stage, const MdiFrame* frame) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->forward(*stage, *frame, c.team, c.scratch); });
}

MDI_API int mdi_half(void* context, const MdiStage* stage, int block, int half, const MdiFrame* frame, float* y) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->half(*stage, block, half, *frame, y, c.team, c.scratch); });
}

MDI_API int mdi_step(void* context, const MdiStage* stage, int block, int half, const MdiFrame* frame) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->step(*stage, block, half, *frame, c.team, c.scratch); });
}

// The second half of a block with experts in two kinds of calls, see Runner. choice: (n_rows, n_used).
MDI_API int mdi_route(void* context, const MdiStage* stage, int block, const MdiFrame* frame, int32_t* choice) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->route(*stage, block, *frame, choice, c.team, c.scratch); });
}

MDI_API int mdi_experts(void* context, const MdiStage* stage, int block, int first, int end, const MdiFrame* frame) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->some_experts(*stage, block, first, end, *frame, c.team, c.scratch); });
}

// mesh: null where Python does all sums.
MDI_API int mdi_shared(void* context, const MdiStage* stage, const MdiFrame* frame, float* y, float* z, MdiMesh* mesh, int32_t* at,
                       int32_t stop) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->shared(*stage, *frame, y, z, mesh, *at, stop, c.team, c.scratch); });
}

MDI_API int mdi_exchange(MdiMesh* mesh, float* x, int64_t n) { return exchange(*mesh, x, n, nullptr); }

MDI_API int mdi_linear(void* context, const MdiNorm* norm, const MdiMatrix* matrix, float softcap, const float* x, int n,
                       float* y) {
  auto& c = *(MdiContext*)context;
  return guarded([&] { c.set->linear(*norm, *matrix, softcap, x, n, y, c.team, c.scratch); });
}

// All blocks, and then a norm and a linear layer for the last row alone: the next token of a small model.
MDI_API int mdi_last(void* context, const MdiStage* stage, const MdiFrame* frame, const MdiNorm* norm, const MdiMatrix* matrix,
                     float softcap, float* y) {
  auto& c = *(MdiContext*)context;
  return guarded([&] {
    c.set->forward(*stage, *frame, c.team, c.scratch);
    c.set->linear(*norm, *matrix, softcap, frame->rows + (int64_t)(frame->n_rows - 1) * matrix->n_in, 1, y, c.team, c.scratch);
  });
}

MDI_API void mdi_function(int which, const float* x, int64_t n, float* y) { chosen()->function(which, x, n, y); }

MDI_API void mdi_pack_int4(const float* rows, int n_panels, int width, const float* factors, int n_factors, uint8_t* to) {
  chosen()->pack_int4(rows, n_panels, width, factors, n_factors, to);
}
