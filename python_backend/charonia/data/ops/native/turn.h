// One operation at a time, and Python's lock. Must not know what is computed.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "pool.h"

namespace charonia {

// Wait for the turn to compute, for a thread that holds Python's lock. While another thread has it,
// which may be for a whole step of a pipeline's stage, Python's others must go on.
inline std::unique_lock<std::mutex> take_turn() {
  std::unique_lock turn(one_at_a_time, std::try_to_lock);
  if (!turn) {
    const pybind11::gil_scoped_release released;
    turn.lock();
  }
  return turn;
}

}  // namespace charonia
