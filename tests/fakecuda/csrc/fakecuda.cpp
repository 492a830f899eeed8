// A CUDA made of a CPU, for tests: docs/fake-gpus.md says what it proves. What Python gets of it is below.
#include "kernels.h"
#include <torch/csrc/utils/pybind.h>

namespace at {
using CUDAHooks = fakecuda::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace fakecuda {

// What a collective reads of a device's memory, as a tensor of the CPU.
Tensor peek(const Tensor& t) {
  static const std::string COLLECTIVE = "a collective";
  at::NoGradGuard no_grad;
  prepare(t.device().index(), COLLECTIVE, {{Range(t), false}});
  at::AutoDispatchBelowADInplaceOrView below;
  return bare(t).clone();
}
// What a collective writes to a device's memory.
void poke(const Tensor& t, const Tensor& content) {
  static const std::string COLLECTIVE = "a collective";
  at::NoGradGuard no_grad;
  prepare(t.device().index(), COLLECTIVE, {{Range(t), true}});
  at::AutoDispatchBelowADInplaceOrView below;
  bare(t).copy_(content.view(t.sizes()));
}
std::vector<std::string> take_races() {
  Lock lock(mutex);
  std::vector<std::string> taken;
  taken.swap(races);
  return taken;
}
std::map<std::string, long> counts_so_far() {
  Lock lock(mutex);
  return counts;
}
void reset() {
  Lock lock(mutex);
  races.clear(), counts.clear(), pinned.forget(), memory.forget();
  devices = {};
}

}  // namespace fakecuda

PYBIND11_MODULE(_fakecuda, m) {
  using namespace fakecuda;
  py::call_guard<py::gil_scoped_release> no_gil;
  m.attr("DEVICES") = DEVICES;
  m.def("peek", &peek, no_gil);
  m.def("poke", &poke, no_gil);
  m.def("races", &take_races, no_gil, "the races since the last call");
  m.def("counts", &counts_so_far, no_gil, "what happened since the last reset -> how often");
  m.def("reset", &reset, no_gil, "the next test begins");
  m.def("current_device", [] { return device_now; });
  m.def("set_device", [](int device) { device_now = device; });
  m.def("memory_allocated", [](int device) { Lock lock(mutex); return memory.in_use.at(device); }, no_gil);
  m.def("max_memory_allocated", [](int device) { Lock lock(mutex); return memory.peak.at(device); }, no_gil);
  m.def("reset_peak_memory_stats", [](int device) { Lock lock(mutex); memory.peak.at(device) = memory.in_use.at(device); }, no_gil);
  m.def("is_capturing", [] { Lock lock(mutex); return current(device_now).capturing != nullptr; }, no_gil);
  m.def("new_pool", [] { Lock lock(mutex); return ++pools; }, no_gil);
  m.def("elapsed_ms", [](intptr_t from, intptr_t to) { return Guard().elapsedTime((void*)from, (void*)to, 0); }, no_gil);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin, no_gil)
      .def("end", &Graph::end, no_gil)
      .def("replay", &Graph::replay, no_gil)
      .def("pool", &Graph::pool)
      .def("__len__", &Graph::size);
}
