// What torch asks of a backend: its allocators, streams, events, and the hooks under the name of CUDA.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "graphs.h"

namespace fakecuda {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int FALSE_ANSWERS = 3;  // of an event's query, before it says that the event has come

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    c10::Device device(CUDA, device_now);
    if (!bytes) return {nullptr, nullptr, &nothing, device};
    auto* graph = current(device_now).capturing;
    char* at = graph ? graph->allocate(bytes) : memory.allocate(bytes, 0, GARBAGE);
    return {at, at, &release, device};
  }
  static void release(void* at) {
    Lock lock(mutex);
    memory.release((char*)at);
  }
  static void nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(memory.bytes_at(to), memory.bytes_at(from), bytes);
  }
};
inline DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = pinned.allocate(bytes);
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* at) { pinned.release(at); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA;
  static int index(c10::Device device) { return device.has_index() ? device.index() : device_now; }
  static c10::Stream stream_of(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), id);
  }
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    device_now = index(device);
    return before;
  }
  c10::Device getDevice() const override { return {CUDA, c10::DeviceIndex(device_now)}; }
  void setDevice(c10::Device device) const override { device_now = index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = index(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override { return stream_of(index(device), stream_now[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(index(device), new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return (void*)(intptr_t)stream.id(); }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    refuse_in_capture(stream.device_index(), stream.id(), "the query of a stream");
    auto& clock = fakecuda::stream(stream.device_index(), stream.id()).clock;
    return devices[stream.device_index()].host.covers(clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    refuse_in_capture(stream.device_index(), stream.id(), "to wait for a stream");
    counts["stream synchronisations"]++;
    host_learns(stream.device_index(), fakecuda::stream(stream.device_index(), stream.id()).clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(mutex);
    refuse_in_any_capture(device, "to wait for a device");
    counts["device synchronisations"]++;
    Clock all;
    for (auto& each : devices[device].streams) all.learn(each.clock);
    host_learns(device, all);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    auto& it = *(Event*)*event;
    const int device = stream.device_index();
    it.device = device, it.recorded = true, it.asked = 0, it.at_ms = now_ms();
    it.timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    it.captured = fakecuda::stream(device, stream.id()).capturing != nullptr;
    if (!it.captured) launch(device, stream.id());
    it.clock = fakecuda::stream(device, stream.id()).clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (!event) return;
    auto& it = *(Event*)event;
    auto& waits = fakecuda::stream(stream.device_index(), stream.id());
    if (it.recorded && it.captured != (waits.capturing != nullptr))
      refuse_in_capture(stream.device_index(), stream.id(), "to wait for work that is not recorded (capture isolation)");
    TORCH_CHECK(!it.captured || waits.capturing, "CUDA error: a stream waits for an event of a capture");
    if (it.device == stream.device_index()) waits.clock.learn(it.clock);
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    if (!event) return true;
    auto& it = of_host(event, "the query of an event");
    if (!devices[it.device].host.covers(it.clock) && it.asked++ < FALSE_ANSWERS) return false;
    host_learns(it.device, it.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (!event) return;
    auto& it = of_host(event, "to wait for an event");
    counts["event synchronisations"]++;
    host_learns(it.device, it.clock);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    Lock lock(mutex);
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    auto &first = of_host(from, "the time of an event"), &second = of_host(to, "the time of an event");
    TORCH_CHECK(first.timed && second.timed, "Both events must be created with argument 'enable_timing=True'.");
    for (auto* each : {&first, &second})
      TORCH_CHECK(devices[each->device].host.covers(each->clock), "CUDA error: device not ready: nobody has waited for this event");
    return second.at_ms - first.at_ms;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(mutex);
    auto block = memory.blocks.find((char*)data.get());
    if (block != memory.blocks.end() && block->second.home != stream.id()) block->second.used_by.push_back(stream.id());
  }

 private:
  static Event& of_host(void* event, const std::string& what) {
    auto& it = *(Event*)event;
    TORCH_CHECK(!it.captured, "CUDA error: operation not permitted on an event last recorded in a capturing stream: ", what);
    return it;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return device_now; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  bool isPinnedPtr(const void* at) const override { return pinned.has(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
};

}  // namespace fakecuda
