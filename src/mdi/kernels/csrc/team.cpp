#include "team.h"

#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

FloatMode::FloatMode() {
#if defined(__x86_64__)
  before_ = _mm_getcsr();
  _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(before_));
  asm volatile("msr fpcr, %0" ::"r"((uint64_t)0));
#else
  before_ = 0;
#endif
}

FloatMode::~FloatMode() {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)before_);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(before_));
#endif
}

static constexpr int kLastSpins = 256;  // some ten microseconds: what a last task takes

Team::Team(int n_threads, int spins) : size_(n_threads), spins_(spins), ranges_(new Range[(size_t)n_threads]) {
  try {
    for (int i = 1; i < n_threads; i++) {
      workers_.emplace_back([this, i] {
        FloatMode mode;
        wait_for_work(i);
      });
    }
  } catch (...) {  // the system refused a thread: those that there are must have ended before they are forgotten
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    state_.fetch_add(kRound);
  }
  wakes_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::share(Call call, const void* work, int n_tasks) {
  call_ = call, work_ = work;  // nobody is inside
  for (int i = 0; i < size_; i++) {
    ranges_[i].next.store((int)((int64_t)n_tasks * i / size_), std::memory_order_relaxed);
    ranges_[i].end = (int)((int64_t)n_tasks * (i + 1) / size_);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);  // so that nobody falls asleep between looking and waiting
    state_.store(state_.load() + kRound + kOpen, std::memory_order_release);
  }
  wakes_.notify_all();
  part(0);
  close();
  if (failed_.exchange(false)) throw std::bad_alloc();
}

// All tasks are begun: who did not come in yet need not, and who did ends a last task.
void Team::close() {
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int i = 0; i < kLastSpins + spins_.load(std::memory_order_relaxed); i++) {
    if (!(state_.load(std::memory_order_acquire) & kInside)) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return !(state_.load(std::memory_order_acquire) & kInside); });
}

void Team::part(int thread) {
  try {
    for (int i = 0; i < size_; i++) {
      Range& range = ranges_[(thread + i) % size_];
      for (int task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) call_(work_, task, thread);
    }
  } catch (const std::bad_alloc&) {  // the only thing that a task throws
    failed_ = true;
  }
}

void Team::leave() {
  uint64_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
  if (before & kOpen || (before & kInside) != 1) return;
  std::lock_guard<std::mutex> lock(mutex_);
  done_.notify_one();
}

void Team::wait_for_work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    auto is_new = [&] { return state_.load(std::memory_order_acquire) / kRound != seen; };
    for (int i = 0; i < spins_.load(std::memory_order_relaxed) && !is_new(); i++) pause_briefly();
    if (!is_new()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wakes_.wait(lock, is_new);
    }
    uint64_t state = state_.load(std::memory_order_acquire);
    seen = state / kRound;
    if (ends_) return;
    while (state & kOpen && state / kRound == seen) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      part(thread);
      leave();
      break;
    }
  }
}
