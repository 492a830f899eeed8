// Operations under the key CUDA: memory, views and copies by hand; every other one is its CPU kernel, run on the
// bytes of the device's tensors. Operations with a structure (add, mm) keep torch's own shapes and allocations.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <torch/library.h>
#include "device.h"

namespace fakecuda {

using at::Tensor;
const c10::DispatchKeySet KEY(c10::DispatchKey::CUDA);

struct OnDevice {
  int before = device_now;
  explicit OnDevice(std::optional<c10::Device> device) { if (device && device->has_index()) device_now = device->index(); }
  ~OnDevice() { device_now = before; }
};

inline Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return at::detail::empty_generic(size, &device_allocator, KEY, dtype.value_or(at::kFloat), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, KEY, dtype.value_or(at::kFloat));
}
inline Tensor view_of(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  return view;
}
inline Tensor as_strided(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(t, size, stride, offset.value_or(t.storage_offset()));
}
inline Tensor view(const Tensor& t, c10::IntArrayRef asked) {
  std::vector<int64_t> size = at::infer_size(asked, t.numel());
  auto stride = at::detail::computeStride(t.sizes(), t.strides(), size);
  TORCH_CHECK(stride, "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
              "two contiguous subspaces). Use .reshape(...) instead.");
  return view_of(t, size, *stride, t.storage_offset());
}
inline Tensor reshape_alias(const Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return view_of(t, size, stride, t.storage_offset());
}
inline const Tensor& resize_(const Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t needed = (t.storage_offset() + t.numel()) * t.itemsize();
  if (needed > t.storage().nbytes()) {
    OnDevice on(t.device());
    t.storage().set_data_ptr_noswap(device_allocator.allocate(needed));
    t.storage().set_nbytes(needed);
  }
  return t;
}
inline void record_stream(Tensor& t, c10::Stream stream) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream); }

// The same memory as a tensor of the CPU, for a kernel. It owns nothing.
inline Tensor bare(const Tensor& t) {
  return at::from_blob(memory.bytes_at(t.data_ptr()), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
}
// A kernel is about to run on the current stream: what it uses is noted. Returns the graph that records it, if any.
using Uses = std::vector<std::pair<Range, bool>>;
inline Graph* prepare(int device, const std::string& op, const Uses& uses) {
  Lock lock(mutex);
  if (auto* graph = current(device).capturing) {
    for (auto& [range, write] : uses)
      if (write && !range.empty()) graph->will_change(range);
    return graph;
  }
  auto when = launch(device);
  for (auto& [range, write] : uses) touch(range, write, when, op);
  return nullptr;
}

// The host waits for the current stream, as a copy to pageable memory does, or the read of a number.
inline void synchronise(int device, const std::string& why) {
  Lock lock(mutex);
  counts[why]++;
  host_learns(device, current(device).clock);
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  static const std::string COPY = "copy_";
  if (!self.numel()) return self;
  Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  const int device = (self.is_cuda() ? self : source).device().index();
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cuda() && source.is_cuda()) {
    TORCH_CHECK(self.device() == source.device(), "copy between fake GPUs: ", source.device(), " to ", self.device());
    Uses uses{{Range(from), false}, {Range(self), true}};
    auto* graph = prepare(device, COPY, uses);
    auto body = [to = bare(self), of = bare(from)]() mutable { to.copy_(of); };
    body();
    if (graph) graph->add({&COPY, uses, body});
    return self;
  }
  const bool up = self.is_cuda();
  const Tensor& host = up ? source : self;
  const bool in_pinned = pinned.has(host.data_ptr()), later = in_pinned && non_blocking, whole = host.is_contiguous();
  if (!later) refuse_in_capture(device, stream_now[device], "a copy that blocks the host");
  char *begin = (char*)host.data_ptr(), *end = begin + (whole ? host.nbytes() : 1);
  auto body = [=, to = bare(self), of = bare(from)]() mutable {
    Lock lock(mutex);
    counts[up ? "copies up" : "copies down"]++;
    auto when = now(device);
    up ? pinned.order_up(begin, end, when) : pinned.order_down(begin, end, when);
    to.copy_(of);
    if (later && whole) up ? pinned.begin_up(begin, end, when) : pinned.begin_down(begin, end, when);
  };
  Uses uses{{Range(up ? self : from), up}};
  auto* graph = prepare(device, COPY, uses);
  TORCH_CHECK(!graph || whole, "a graph of the fake GPUs copies contiguous memory of the host");
  if (graph) graph->add({&COPY, uses, body});
  else body();
  if (!later) synchronise(device, in_pinned ? "blocking copies" : "pageable copies");
  return self;
}

// A call of an operation: its arguments as CPU tensors, and what it uses.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), arguments_(op.schema().arguments()), name_(op.operator_name().name),
        begin_(stack->size() - arguments_.size()), given_(stack->begin() + begin_, stack->end()) {
    for (size_t i = 0; i < arguments_.size(); i++) take((*stack)[begin_ + i], writes(arguments_[i]));
    device_ = where_ && where_->has_index() ? where_->index() : device_now;
  }
  void run() {
    OnDevice on(c10::Device(CUDA, device_));
    const bool reads = op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape) || name_ == "aten::equal";
    if (reads) refuse_in_capture(device_, stream_now[device_], name_ + " reads a number of the device");
    graph_ = prepare(device_, name_, uses_);
    if (graph_) bare_.assign(stack_->begin() + begin_, stack_->end());
    kernel(op_, stack_);
    give_back();
    if (graph_) record();
    if (reads) synchronise(device_, "numbers read");
  }

 private:
  c10::OperatorHandle op_;
  torch::jit::Stack* stack_;
  const std::vector<c10::Argument>& arguments_;
  const std::string& name_;
  size_t begin_;
  std::vector<c10::IValue> given_, bare_;
  std::vector<std::pair<Range, bool>> uses_;
  std::vector<Tensor> seen_, fresh_;                    // given tensors of the device; results in memory of their own
  std::vector<std::pair<Tensor, Tensor>> grown_;        // outputs of no elements, and what stands for them
  std::optional<c10::Device> where_;
  int device_;
  Graph* graph_ = nullptr;

  static bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

  void take(c10::IValue& value, bool write) {
    if (value.isTensor()) {
      value = take(value.toTensor(), write);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& each : value.toTensorVector()) list.push_back(take(each, write));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(take(*each, write)) : each);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      where_ = value.toDevice(), value = c10::Device(c10::DeviceType::CPU);
    }
  }
  Tensor take(const Tensor& t, bool write) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {  // a number may come from the host
      TORCH_CHECK(t.dim() == 0 && !write, "Expected all tensors to be on the same device, but ", name_, " got a tensor on ",
                  t.device(), " of shape ", t.sizes());
      return t.clone();
    }
    TORCH_CHECK(!where_ || !where_->has_index() || *where_ == t.device(), "Expected all tensors to be on the same device, but ",
                name_, " got ", *where_, " and ", t.device());
    where_ = t.device();
    uses_.emplace_back(Range(t), write), seen_.push_back(t);
    if (!write || t.numel()) return bare(t);
    grown_.emplace_back(t, at::empty(t.sizes(), at::TensorOptions().dtype(t.dtype())));
    return grown_.back().second;
  }
  static void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  void give_back() {
    for (auto& [t, result] : grown_) {
      if (!result.numel()) continue;
      TORCH_CHECK(!graph_, "a graph of the fake GPUs does not hold ", name_, ", which resizes its output");
      resize_(t, result.sizes(), std::nullopt);
      t.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      fill(t, result);
    }
    const auto& returns = op_.schema().returns();
    const auto first = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); i++) {
      auto& value = (*stack_)[first + i];
      if (writes(returns[i])) {
        for (size_t j = 0; j < arguments_.size(); j++)
          if (writes(arguments_[j]) && *arguments_[j].alias_info() == *returns[i].alias_info()) value = given_[j];
      } else if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const auto& each : value.toTensorVector()) list.push_back(result(each));
        value = list;
      }
    }
  }
  // A kernel's result as a tensor of the device: a view of what was given, or new memory.
  Tensor result(const Tensor& t) {
    if (!t.defined()) return t;
    if (char* at = t.numel() ? memory.seen_at(t.data_ptr()) : nullptr)
      for (auto& each : seen_) {
        char* base = (char*)each.storage().data();
        if (at >= base && at < base + each.storage().nbytes()) return view_of(each, t.sizes(), t.strides(), (at - base) / t.itemsize());
      }
    Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &device_allocator, KEY, t.scalar_type());
    fill(made, t);
    fresh_.push_back(made);
    return made;
  }
  void fill(const Tensor& t, const Tensor& content) {
    bare(t).copy_(content);
    Lock lock(mutex);
    if (!graph_) touch(Range(t), true, now(device_), name_);
  }
  // The graph holds this call with addresses instead of tensors.
  void record() {
    std::vector<Tensor> targets;
    for (auto& each : fresh_) uses_.emplace_back(Range(each), true), targets.push_back(bare(each));
    auto again = [op = op_, arguments = bare_, targets]() mutable {
      torch::jit::Stack stack = arguments;
      kernel(op, &stack);
      size_t next = 0;
      auto keep = [&](const Tensor& t) {
        if (t.defined() && !(t.numel() && memory.seen_at(t.data_ptr())) && next < targets.size()) targets[next++].copy_(t);
      };
      for (auto& value : stack) {
        if (value.isTensor()) keep(value.toTensor());
        else if (value.isTensorList()) for (const auto& each : value.toTensorVector()) keep(each);
      }
    };
    graph_->add({&name_, uses_, again});
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }
inline int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) { return 0; }  // the math one

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("copy_", copy_);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", sdp_choice);
}

}  // namespace fakecuda
