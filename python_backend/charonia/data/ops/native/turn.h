// One operation at a time, and Python's lock. Must not know what is computed.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "pool.h"

namespace charonia {

// For a thread that must not go on once the interpreter ends: it stays until the process has ended,
// as threads that come back to Python do from Python 3.14 on.
[[noreturn]] inline void stay() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Lets go of Python's lock while it lives. Not pybind11's: an interpreter that ends has a thread
// end where it comes back for the lock, by unwinding its stack, and where that meets a destructor
// the process is aborted.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (const abi::__forced_unwind&) {
      stay();
    }
  }

 private:
  PyThreadState* const thread_;
};

// Once the interpreter ends, the thread that ends it. It alone computes from then on: others would
// compute with what is being freed. Read and written in one's turn.
inline std::thread::id last_thread;

inline bool is_too_late() {
  return last_thread != std::thread::id() && last_thread != std::this_thread::get_id();
}

// Wait for the turn to compute, for a thread that does not hold Python's lock.
inline std::unique_lock<std::mutex> await_turn() {
  std::unique_lock turn(one_at_a_time);
  if (is_too_late()) {
    turn.unlock();
    stay();
  }
  return turn;
}

// The same for one that does. While another thread has the turn, which may be for a whole step of a
// pipeline's stage, Python's others must go on.
inline std::unique_lock<std::mutex> take_turn() {
  std::unique_lock turn(one_at_a_time, std::try_to_lock);
  if (!turn || is_too_late()) {
    if (turn) turn.unlock();
    const Unlocked unlocked;
    turn = await_turn();
  }
  return turn;
}

// The interpreter is about to end: what computes may end first, within reason.
inline void take_last_turns() {
  const Unlocked unlocked;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  std::unique_lock turn(one_at_a_time, std::try_to_lock);
  while (!turn && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    turn.try_lock();
  }
  if (turn) last_thread = std::this_thread::get_id();
}

}  // namespace charonia
