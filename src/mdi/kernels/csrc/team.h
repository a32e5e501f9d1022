// The threads of a stage. Work is cut into tasks whose results do not depend on who does them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
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

  // Calls work(task, thread) for each task below n_tasks. Neighbouring tasks go to the same thread.
  template <class Work>
  void run(int n_tasks, const Work& work) {
    if (size() == 1 || n_tasks < 2) {
      for (int task = 0; task < n_tasks; task++) work(task, 0);
      return;
    }
    share([](const void* w, int task, int thread) { (*(const Work*)w)(task, thread); }, &work, n_tasks);
  }

 private:
  using Call = void (*)(const void*, int, int);
  void share(Call call, const void* work, int n_tasks);
  void part(int thread);
  void wait_for_work(int thread);

  int size_;
  int spins_;
  Call call_ = nullptr;
  const void* work_ = nullptr;
  int n_tasks_ = 0;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> left_{0};
  std::atomic<bool> ends_{false};
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
