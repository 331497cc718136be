// In-order queues and events for protocol_test.cpp: what streams and events are on a GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

namespace relibra::replica_sync {

// Set once.
class Event {
 public:
  void set() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// Sleeps for a random time: often not at all, now and then for the time of many uses.
inline void pause() {
  thread_local std::minstd_rand random(
      static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  const unsigned choice = static_cast<unsigned>(random() >> 8) % 16;
  if (choice < 6)
    std::this_thread::sleep_for(std::chrono::microseconds(choice == 0 ? 10000 : 500 * choice));
}

// Runs its tasks one after the other on a thread of its own, with pauses before them.
class Queue {
 public:
  Queue() : worker_([this] { work(); }) {}
  ~Queue() {
    add(nullptr);  // ends the worker after all tasks
    worker_.join();
  }
  void add(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) return;
      pause();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread worker_;  // last: starts when the others exist
};

}  // namespace relibra::replica_sync
