#include "team.h"

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

Team::Team(int n_threads, int spins) : size_(n_threads), spins_(spins) {
  for (int i = 1; i < n_threads; i++) {
    workers_.emplace_back([this, i] {
      FloatMode mode;
      wait_for_work(i);
    });
  }
}

Team::~Team() {
  ends_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    round_++;
  }
  wakes_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::share(Call call, const void* work, int n_tasks) {
  call_ = call, work_ = work, n_tasks_ = n_tasks;
  left_.store((int)workers_.size(), std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);  // so that nobody falls asleep between looking and waiting
    round_.fetch_add(1, std::memory_order_release);
  }
  wakes_.notify_all();
  part(0);
  for (int i = 0; i < spins_; i++) {
    if (left_.load(std::memory_order_acquire) == 0) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return left_.load(std::memory_order_acquire) == 0; });
}

void Team::part(int thread) {
  int64_t n = n_tasks_, of = size();
  for (int task = (int)(n * thread / of); task < (int)(n * (thread + 1) / of); task++) call_(work_, task, thread);
}

void Team::wait_for_work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < spins_ && round_.load(std::memory_order_acquire) == seen; i++) pause_briefly();
    if (round_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wakes_.wait(lock, [this, seen] { return round_.load(std::memory_order_acquire) != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    if (ends_) return;
    part(thread);
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}
