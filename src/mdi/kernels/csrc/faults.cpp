// Mapped files whose pages cannot be read: the process ends with a line that names the file, not with a bare SIGBUS.
//
// A table of ranges with their messages. The handler only reads it, and calls nothing but write and _exit.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <signal.h>
#include <unistd.h>

#define MDI_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int n_slots = 4096;

struct Range {
  std::atomic<uintptr_t> start{0};  // 0: not used
  uintptr_t stop = 0;
  char* message = nullptr;
};

Range ranges[n_slots];
std::mutex changing;
struct sigaction before;

void on_bus_error(int number, siginfo_t* info, void*) {
  const uintptr_t at = (uintptr_t)info->si_addr;
  for (const Range& range : ranges) {
    const uintptr_t start = range.start.load(std::memory_order_acquire);
    if (start != 0 && start <= at && at < range.stop) {
      ssize_t n = write(2, range.message, strlen(range.message));
      (void)n;
      _exit(1);
    }
  }
  sigaction(number, &before, nullptr);  // not one of ours: the instruction faults again, for whoever was there before us
}

void install() {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &before);
}

}  // namespace

// Ends the process with `message` where a page of [start, start + n_bytes) cannot be read. Returns a slot, -1 if none is free.
MDI_API int mdi_watch_mapping(const void* start, size_t n_bytes, const char* message) {
  std::lock_guard<std::mutex> lock(changing);
  static bool is_installed = false;
  if (!is_installed) install();
  is_installed = true;
  for (int i = 0; i < n_slots; i++) {
    Range& range = ranges[i];
    if (range.start.load() != 0) continue;
    range.stop = (uintptr_t)start + n_bytes;
    range.message = strdup(message);
    if (range.message == nullptr) return -1;
    range.start.store((uintptr_t)start, std::memory_order_release);
    return i;
  }
  return -1;
}

MDI_API void mdi_unwatch_mapping(int slot) {
  std::lock_guard<std::mutex> lock(changing);
  if (slot < 0 || slot >= n_slots) return;
  ranges[slot].start.store(0);
  free(ranges[slot].message);
  ranges[slot].message = nullptr;
}
