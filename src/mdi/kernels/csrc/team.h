// The threads of a stage. Work is cut into tasks whose results do not depend on who does them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class Team {
 public:
  // n_threads with the calling one. spins: how often an idle thread looks for work before it sleeps; 0 where cores are shared.
  Team(int n_threads, int spins);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  void set_spins(int spins) { spins_.store(spins, std::memory_order_relaxed); }

  // Calls work(task, thread) for each task below n_tasks. Each thread begins with neighbouring tasks of its own, and then takes
  // what others have not begun: a thread that is still asleep, or that lost its core, delays nobody. std::bad_alloc if a task had it.
  template <class Work>
  void run(int n_tasks, const Work& work) {
    if (size() == 1 || n_tasks < 2) return alone(n_tasks, work);
    share([](const void* w, int task, int thread) { (*(const Work*)w)(task, thread); }, &work, n_tasks);
  }

  // Of rows that take a microsecond or two each: waking a thread for a few of them takes longer.
  template <class Work>
  void run_rows(int n_rows, const Work& work) {
    if (n_rows < kFewRows) return alone(n_rows, work);
    run(n_rows, work);
  }

 private:
  using Call = void (*)(const void*, int, int);
  static constexpr int kFewRows = 16;
  // State of the round: its number, whether a thread may still come in, and how many have.
  static constexpr uint64_t kRound = 1 << 16, kOpen = 1 << 15, kInside = kOpen - 1;
  struct alignas(64) Range {
    std::atomic<int> next{0};  // of the tasks that a thread begins with
    int end = 0;
  };

  template <class Work>
  void alone(int n_tasks, const Work& work) {
    for (int task = 0; task < n_tasks; task++) work(task, 0);
  }
  void end();
  void share(Call call, const void* work, int n_tasks);
  void part(int thread);
  void close();
  void leave();
  void wait_for_work(int thread);

  int size_;
  std::atomic<int> spins_;
  Call call_ = nullptr;
  const void* work_ = nullptr;
  std::unique_ptr<Range[]> ranges_;
  std::atomic<uint64_t> state_{0};
  std::atomic<bool> ends_{false}, failed_{false};
  std::mutex mutex_;
  std::condition_variable wakes_, done_;
  std::vector<std::thread> workers_;
};

// Rounding to nearest, denormals kept, on the calling thread as long as this lives: results depend on both.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();

 private:
  uint64_t before_;
};
