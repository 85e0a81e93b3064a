// A simulated accelerator as a real device of PyTorch ("fakegpu"), for tests of what only accelerators do.
//
// Its memory is host memory, and operators are computed by the CPU's kernels, at once and exactly as there. What makes it
// an accelerator to the program is what it can see of one:
// - tensors that cannot be mixed with the host's, and that a read of the host has to wait for (reads are counted);
// - streams and events: work is queued, and done only when somebody waits for it or the device has come that far. How far
//   behind the host it is, is set in operators or in ticks, so a test is late by exactly as much as it wants to be;
// - a copy to the host that is not waited for has not happened yet, and one on a side stream reads its source as late as
//   it may;
// - a copy to the host on a side stream and an operator that touches the same memory, with nothing that orders them, are
//   an error.
#include <Python.h> // first, as it wants

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kPool = 32; // as many side streams as CUDA's pool has: the next one is the first again

std::recursive_mutex& mutex() {
  static auto* it = new std::recursive_mutex; // leaked: threads may outlive static objects
  return *it;
}

void acquire(std::recursive_mutex& mutex) { // lets go of the interpreter meanwhile: who has it may need that, to drop a tensor
  if (mutex.try_lock()) return;
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  mutex.lock();
  if (state) PyEval_RestoreThread(state);
}

struct Lock {
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    acquire(mutex_);
  }
  Lock(const Lock&) = delete;
  ~Lock() {
    mutex_.unlock();
  }
  std::recursive_mutex& mutex_;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int device_count() {
  static const int count = [] {
    const char* asked = std::getenv("FAKEGPU_COUNT");
    return asked ? std::atoi(asked) : 1;
  }();
  return count;
}

// ---------------------------------------------------------------------------------------------------------- time and order

using StreamKey = std::pair<int, int64_t>; // device and number; number 0 is the stream that is there from the start
using Clocks = std::map<StreamKey, uint64_t>; // of each stream, the last operation that has certainly come before

void merge(Clocks& into, const Clocks& other) {
  for (const auto& [key, at] : other) {
    auto& mine = into[key];
    mine = std::max(mine, at);
  }
}

struct Recorded { // one recording of an event
  StreamKey stream;
  bool done = false;
  double at = 0; // on the device's own time line
  Clocks before;
};
using RecordedPtr = std::shared_ptr<Recorded>;

struct Work {
  uint64_t due; // not before this tick, unless somebody waits
  double at; // nor before this time
  std::function<void()> run;
  RecordedPtr after; // of another stream, has to be done first
  RecordedPtr marks; // is done by this
};

struct StreamState {
  std::deque<Work> queue;
  Clocks before;
  uint64_t clock = 0;
  double busy_until = 0;
};

struct Access {
  StreamKey stream;
  uint64_t clock;
  std::string what;
  bool is_side_copy; // to the host: only these are checked, since frameworks have races of their own
};
struct Accesses {
  std::optional<Access> write;
  std::map<StreamKey, Access> reads;
};

struct Simulator {
  std::map<StreamKey, StreamState> streams;
  std::map<void*, Accesses> accesses; // by the address of an allocation
  std::map<void*, std::pair<size_t, int>> allocations;
  std::map<int, int64_t> allocated, peak;
  std::set<int> contexts; // devices that this process has used
  Clocks host; // what has come before whatever the host does now
  uint64_t tick = 0;
  int64_t lag = 0;
  bool lag_in_operators = true;
  bool checks_races = true;
  int64_t next_stream = 1;
  std::map<std::thread::id, int64_t> syncs;
  bool refuses_syncs = false;
};

Simulator& sim() {
  static auto* it = new Simulator;
  return *it;
}

thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;

StreamKey current_key(int device) {
  auto found = current_streams.find(device);
  return {device, found == current_streams.end() ? 0 : found->second};
}

bool is_due(const Work& work) {
  return work.due <= sim().tick && work.at <= now();
}

void run_all(StreamKey key, const Recorded* until);

void finish(const RecordedPtr& recorded) { // as somebody who waits
  if (!recorded->done) run_all(recorded->stream, recorded.get());
}

void sleep_until(double at) {
  static const bool spins = std::getenv("AS_ON_GPU_SPINS") != nullptr; // as the host does that waits for a GPU
  while (spins && now() < at);
  while (now() < at) std::this_thread::sleep_for(std::chrono::duration<double>(at - now()));
}

void pop(StreamState& stream) {
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (work.run) work.run();
  if (work.marks) work.marks->done = true;
}

void run_all(StreamKey key, const Recorded* until) {
  auto& stream = sim().streams[key];
  while (!stream.queue.empty() && !(until && until->done)) {
    if (auto after = stream.queue.front().after; after && !after->done) {
      finish(after); // others may go on meanwhile, with this stream too
      continue;
    }
    if (stream.queue.front().at > now()) {
      double at = stream.queue.front().at;
      mutex().unlock(); // held exactly once where this can happen: others may go on
      sleep_until(at);
      mutex().lock();
      continue;
    }
    pop(stream);
  }
}

void run_due() {
  for (bool any = true; any;) {
    any = false;
    for (auto& [key, stream] : sim().streams) {
      while (!stream.queue.empty() && is_due(stream.queue.front())) {
        if (auto after = stream.queue.front().after; after && !after->done) break;
        pop(stream);
        any = true;
      }
    }
  }
}

void enqueue(StreamKey key, std::function<void()> run, RecordedPtr after = nullptr, RecordedPtr marks = nullptr) {
  auto& stream = sim().streams[key];
  stream.queue.push_back(
      {sim().tick + (uint64_t)sim().lag, stream.busy_until, std::move(run), std::move(after), std::move(marks)});
  run_due();
}

void advance() { // the device has come further by one
  sim().tick++;
  run_due();
}

void host_waits(const char* what) {
  auto& s = sim();
  s.syncs[std::this_thread::get_id()]++;
  TORCH_CHECK(!s.refuses_syncs, "called a synchronizing CUDA operation, or what would be one there: ", what);
}

void synchronize_stream(StreamKey key) {
  run_all(key, nullptr);
  auto& stream = sim().streams[key];
  while (stream.busy_until > now()) {
    double at = stream.busy_until;
    mutex().unlock(); // held exactly once where this can happen: others may ask meanwhile
    sleep_until(at);
    mutex().lock();
  }
  merge(sim().host, stream.before);
  auto& mine = sim().host[key];
  mine = std::max(mine, stream.clock);
}

// -------------------------------------------------------------------------------------------------------------------- memory

void context(int device) {
  sim().contexts.insert(device);
}

void free_device(void* pointer) {
  Lock lock(mutex());
  auto& s = sim();
  if (auto found = s.allocations.find(pointer); found != s.allocations.end()) {
    s.allocated[found->second.second] -= (int64_t)found->second.first;
    s.allocations.erase(found);
    s.accesses.erase(pointer);
  }
  std::free(pointer);
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    Lock lock(mutex());
    int device = current_device;
    void* pointer = nullptr;
    if (size) {
      TORCH_CHECK(!posix_memalign(&pointer, 64, size), "fakegpu: out of memory");
      auto& s = sim();
      context(device);
      s.allocations[pointer] = {size, device};
      s.allocated[device] += (int64_t)size;
      s.peak[device] = std::max(s.peak[device], s.allocated[device]);
    }
    return {pointer, pointer, &free_device, at::Device(kFake, (at::DeviceIndex)device)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kFake, &device_allocator);

std::map<const char*, size_t>& pinned() {
  static auto* it = new std::map<const char*, size_t>;
  return *it;
}

bool is_pinned(const void* data) {
  Lock lock(mutex());
  auto after = pinned().upper_bound((const char*)data);
  if (after == pinned().begin()) return false;
  auto found = std::prev(after);
  return (const char*)data < found->first + found->second;
}

void free_pinned(void* pointer) {
  Lock lock(mutex());
  pinned().erase((const char*)pointer);
  std::free(pointer);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    Lock lock(mutex());
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, 64, std::max<size_t>(size, 1)), "no memory");
    pinned()[(const char*)pointer] = std::max<size_t>(size, 1);
    return {pointer, pointer, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
PinnedAllocator pinned_allocator;

// ----------------------------------------------------------------------------------------------------------------- who waits

[[noreturn]] void race(const Access& earlier, const std::string& what, StreamKey stream) {
  TORCH_CHECK(
      false, "fakegpu: ", what, " on stream ", stream.second, " of device ", stream.first,
      " touches memory that ", earlier.what, " on stream ", earlier.stream.second,
      " has touched, and nothing says which of them comes first");
}

bool comes_before(const Access& earlier, StreamKey stream, bool is_side_copy) {
  if (earlier.stream == stream || !(earlier.is_side_copy || is_side_copy)) return true;
  auto covered = [&](const Clocks& clocks) {
    auto found = clocks.find(earlier.stream);
    return found != clocks.end() && found->second >= earlier.clock;
  };
  return covered(sim().streams[stream].before) || covered(sim().host);
}

void touch(void* address, StreamKey stream, bool writes, const std::string& what, bool is_side_copy = false) {
  auto& s = sim();
  if (!s.checks_races || !s.allocations.count(address)) return;
  auto& seen = s.accesses[address];
  if (seen.write && !comes_before(*seen.write, stream, is_side_copy)) race(*seen.write, what, stream);
  Access access{stream, s.streams[stream].clock, what, is_side_copy};
  if (writes) {
    for (auto& [_, read] : seen.reads)
      if (!comes_before(read, stream, is_side_copy)) race(read, what, stream);
    seen.reads.clear();
    seen.write = access;
  } else {
    seen.reads[stream] = access;
  }
}

// ------------------------------------------------------------------------------------------------------------ kernels of ours

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

at::Tensor on_host(const at::Tensor& tensor) { // the same memory, as the host's
  auto options = tensor.options().device(at::kCPU);
  void* base = tensor.storage().mutable_data();
  if (!base) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), at::DataPtr(base, at::kCPU), nullptr, false);
  auto host = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  if (tensor.is_conj()) host.unsafeGetTensorImpl()->_set_conj(true);
  if (tensor.is_neg()) host.unsafeGetTensorImpl()->_set_neg(true);
  return host;
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "fakegpu: only strided tensors");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "fakegpu: only strided tensors");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void launch(StreamKey stream) { // before an operator computes
  auto& s = sim();
  context(stream.first);
  if (stream.second != 0) run_all(stream, nullptr); // what was queued comes first
  auto& state = s.streams[stream];
  state.clock++;
  state.before[stream] = state.clock;
  if (s.lag_in_operators) advance();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Lock lock(mutex());
  int device = is_fake(source) ? source.device().index() : target.device().index();
  auto stream = current_key(device);
  launch(stream);
  if (is_fake(source) && is_fake(target)) {
    auto other = current_key(target.device().index());
    touch(source.storage().mutable_data(), stream, false, "a copy");
    touch(target.storage().mutable_data(), other, true, "a copy");
    on_host(target).copy_(on_host(source));
    return target;
  }
  if (is_fake(target)) { // what the host has written is read at once: no harm can be done by later writes to it
    touch(target.storage().mutable_data(), stream, true, "a copy from the host");
    on_host(target).copy_(source);
    if (!non_blocking || !source.is_pinned()) {
      host_waits("a copy from the host");
      merge(sim().host, sim().streams[stream].before);
    }
    return target;
  }
  auto reads = [=, what = std::string("a copy to the host")] {
    touch(source.storage().mutable_data(), stream, false, what, stream.second != 0);
  };
  if (non_blocking && is_pinned(target.const_data_ptr())) {
    reads();
    if (stream.second == 0) { // operators that come later on this stream are computed at once, so it is read now
      auto content = on_host(source).to(target.scalar_type(), false, true);
      enqueue(stream, [=] { at::Tensor(target).copy_(content); });
    } else {
      enqueue(stream, [=] { at::Tensor(target).copy_(on_host(source)); });
    }
    return target;
  }
  host_waits("a copy to the host");
  synchronize_stream(stream);
  reads();
  at::Tensor(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Lock lock(mutex());
  auto stream = current_key(self.device().index());
  launch(stream);
  touch(self.storage().mutable_data(), stream, false, "a read");
  host_waits("a read of a number");
  synchronize_stream(stream);
  return at::_local_scalar_dense(on_host(self));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::native::resize_impl_cpu_(
      self.unsafeGetTensorImpl(), size, stride.data() ? std::make_optional(stride) : std::nullopt, false);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, storage);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  return self.set_(c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_allocator, true), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {}

// ---------------------------------------------------------------------------------------------------- all the other operators

at::Generator& generator_of(int device) {
  static auto* generators = new std::map<int, at::Generator>;
  Lock lock(mutex());
  auto found = generators->find(device);
  if (found == generators->end())
    found = generators->emplace(device, at::detail::createCPUGenerator(c10::default_rng_seed_val)).first;
  return found->second;
}

struct WithRandomStateOf { // operators draw from the CPU's default generator: it has the device's state for a moment
  at::Generator& mine;
  at::Generator host;
  at::Tensor kept;
  explicit WithRandomStateOf(int device) : mine(generator_of(device)), host(at::detail::getDefaultCPUGenerator()) {
    kept = host.get_state();
    host.set_state(mine.get_state());
  }
  ~WithRandomStateOf() {
    mine.set_state(host.get_state());
    host.set_state(kept);
  }
};

at::Tensor as_device(const at::Tensor& host, int device) { // takes over what an operator has made
  at::Tensor dense = host.is_contiguous() || host.is_non_overlapping_and_dense() ? host : host.contiguous();
  const c10::DeviceGuard guard(c10::Device(kFake, (c10::DeviceIndex)device));
  auto made = at::detail::empty_strided_generic(
      dense.sizes(), dense.strides(), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dense.scalar_type());
  if (dense.numel()) std::memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), made.storage().nbytes());
  if (dense.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  Lock lock(mutex());
  int device = input.device().index();
  launch(current_key(device));
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return as_device(
      at::convolution(
          on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups),
      device);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Lock lock(mutex());
  int device = input.device().index();
  launch(current_key(device));
  auto of_bias = std::vector<int64_t>{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [a, b, c] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), c10::OptionalArrayRef<int64_t>(of_bias), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto give = [&](const at::Tensor& each) { return each.defined() ? as_device(each, device) : each; };
  return {give(a), give(b), give(c)};
}

bool reads_on_host(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::is_nonzero",
      "aten::unique_consecutive", "aten::_assert_async"};
  return names.count(name) > 0;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock lock(mutex());
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  int device = -1;
  struct Given {
    at::Tensor fake, host;
    bool written;
    const c10::AliasInfo* alias;
  };
  std::vector<Given> given;
  auto look = [&](const at::Tensor& tensor) {
    if (!is_fake(tensor)) {
      TORCH_CHECK(
          !tensor.defined() || (tensor.dim() == 0 && tensor.numel() == 1) || name == "aten::index" ||
              name == "aten::_index_put_impl_" || name == "aten::index_put_" || name == "aten::index_put" ||
              name == "aten::_foreach_mul_" || name == "aten::_foreach_copy_",
          "Expected all tensors to be on the same device, but ", name, " got one on ", tensor.device(),
          " besides those on fakegpu");
      return;
    }
    TORCH_CHECK(
        device < 0 || device == tensor.device().index() || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but ", name, " got some on fakegpu:", device, " and ",
        tensor.device());
    if (device < 0) device = tensor.device().index();
  };
  for (size_t i = 0; i < count; i++) {
    const auto& value = (*stack)[begin + i];
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const auto& each : value.toTensorVector()) look(each);
    if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector())
        if (each) look(*each);
  }
  bool asked_for_device = false;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isDevice() && value.toDevice().type() == kFake) {
      if (device < 0) device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      value = c10::IValue(c10::Device(at::kCPU));
      asked_for_device = true;
    }
  }
  if (device < 0) device = current_device;
  auto stream = current_key(device);
  launch(stream);
  if (reads_on_host(name)) {
    host_waits(name.c_str());
    synchronize_stream(stream);
  }
  auto host_of = [&](const at::Tensor& tensor, const c10::AliasInfo* alias) {
    if (!is_fake(tensor)) return tensor;
    bool written = alias && alias->isWrite();
    auto host = on_host(tensor);
    touch(tensor.storage().mutable_data(), stream, written, name);
    given.push_back({tensor, host, written, alias});
    return host;
  };
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    if (value.isTensor()) {
      value = host_of(value.toTensor(), alias);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const auto& each : value.toTensorVector()) hosts.push_back(host_of(each, alias));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& each : value.toOptionalTensorVector())
        hosts.push_back(each ? std::make_optional(host_of(*each, nullptr)) : std::nullopt);
      value = hosts;
    }
  }
  {
    std::optional<WithRandomStateOf> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto& each : given) { // an output that has got another size has other memory now
    if (!each.written) continue;
    if (each.host.sizes() != each.fake.sizes() || each.host.strides() != each.fake.strides() ||
        each.host.storage().data() != each.fake.storage().data()) {
      auto made = as_device(each.host, device);
      each.fake.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      each.fake.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      each.fake.unsafeGetTensorImpl()->set_storage_offset(0);
    }
  }
  auto result_of = [&](const at::Tensor& host) -> at::Tensor {
    if (!host.defined()) return host;
    for (auto& each : given)
      if (each.host.is_same(host)) return each.fake;
    for (auto& each : given) { // a view
      if (host.storage().data() && host.storage().data() == each.fake.storage().data()) {
        auto made = at::detail::make_tensor<at::TensorImpl>(
            c10::Storage(each.fake.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
        made.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
        return made;
      }
    }
    if (given.empty() && !asked_for_device) return host;
    auto made = as_device(host, device);
    touch(made.storage().mutable_data(), stream, true, name);
    return made;
  };
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = result_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> fakes;
      for (const auto& each : value.toTensorVector()) fakes.push_back(result_of(each));
      value = fakes;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize_);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(pow, Tensor_Scalar, fp32)
}

// ------------------------------------------------------------------------------------------------- devices, streams and events

struct Event {
  RecordedPtr recorded;
};

c10::Stream as_stream(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, (c10::DeviceIndex)key.first), key.second);
}
StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kFake;
  }
  c10::Device getDevice() const override {
    return {kFake, (c10::DeviceIndex)current_device};
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "fakegpu: invalid device ordinal ", (int)device.index());
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return (c10::DeviceIndex)device_count();
  }
  int index(c10::Device device) const {
    return device.has_index() ? device.index() : current_device;
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current_key(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream({index(device), 0});
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    Lock lock(mutex());
    context(index(device));
    return as_stream({index(device), 1 + (sim().next_stream++ - 1) % kPool});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // no override: torch 2.8 does not ask for it
    return (void*)(intptr_t)stream.id();
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex());
    if (!*event) *event = new Event;
    auto key = key_of(stream);
    auto& state = sim().streams[key];
    context(key.first);
    state.clock++;
    state.before[key] = state.clock;
    auto recorded = std::make_shared<Recorded>();
    recorded->stream = key;
    recorded->at = std::max(state.busy_until, now());
    recorded->before = state.before;
    ((Event*)*event)->recorded = recorded;
    enqueue(key, nullptr, nullptr, recorded);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex());
    if (!event || !((Event*)event)->recorded) return;
    auto recorded = ((Event*)event)->recorded;
    auto key = key_of(stream);
    auto& state = sim().streams[key];
    merge(state.before, recorded->before);
    if (key == recorded->stream) return;
    if (key.second == 0) { // its operators are computed at once, so what they wait for has to be done
      finish(recorded);
    } else {
      enqueue(key, nullptr, recorded);
    }
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex());
    run_due();
    if (!event || !((Event*)event)->recorded) return true;
    auto recorded = ((Event*)event)->recorded;
    if (recorded->done) merge(sim().host, recorded->before);
    return recorded->done;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex());
    if (!event || !((Event*)event)->recorded) return;
    auto recorded = ((Event*)event)->recorded;
    finish(recorded);
    sleep_until(recorded->at);
    merge(sim().host, recorded->before);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    Lock lock(mutex());
    auto from = ((Event*)first)->recorded, to = ((Event*)second)->recorded;
    TORCH_CHECK(from && to, "fakegpu: an event was not recorded");
    TORCH_CHECK(from->done && to->done, "fakegpu: an event was read before its time");
    return (to->at - from->at) * 1000;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex());
    run_due();
    auto& state = sim().streams[key_of(stream)];
    return state.queue.empty() && state.busy_until <= now();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex());
    synchronize_stream(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(mutex());
    for (auto& [key, _] : sim().streams)
      if (key.first == device) synchronize_stream(key);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    Lock lock(mutex());
    return sim().contexts.count(device) > 0;
  }
  c10::DeviceIndex deviceCount() const override {
    return (c10::DeviceIndex)device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kFake, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return (c10::DeviceIndex)current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kFake, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  at::Device getDeviceFromPtr(void* data) const override {
    Lock lock(mutex());
    auto& all = sim().allocations;
    auto after = all.upper_bound(data);
    TORCH_CHECK(after != all.begin(), "fakegpu: no memory of a device");
    return {kFake, (c10::DeviceIndex)std::prev(after)->second.second};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::detail::createCPUGenerator(c10::default_rng_seed_val);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto data = device_allocator.allocate(size);
    if (storage.data() && data.get()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

// -------------------------------------------------------------------------------------------------------- what tests can set

void set_lag(int64_t lag, bool in_operators) {
  Lock lock(mutex());
  sim().lag = lag;
  sim().lag_in_operators = in_operators;
}

void tick() {
  Lock lock(mutex());
  advance();
}

void occupy(double seconds) { // the current stream's device is busy for so long
  Lock lock(mutex());
  auto& stream = sim().streams[current_key(current_device)];
  stream.busy_until = std::max(stream.busy_until, now()) + seconds;
}

int64_t syncs() {
  Lock lock(mutex());
  return sim().syncs[std::this_thread::get_id()];
}

int64_t memory(int64_t device, bool at_most) {
  Lock lock(mutex());
  return at_most ? sim().peak[(int)device] : sim().allocated[(int)device];
}

void refuse_syncs(bool whether) {
  Lock lock(mutex());
  sim().refuses_syncs = whether;
}

void check_races(bool whether) {
  Lock lock(mutex());
  sim().checks_races = whether;
}

std::vector<int64_t> contexts() {
  Lock lock(mutex());
  return {sim().contexts.begin(), sim().contexts.end()};
}

void pin(int64_t address, int64_t size) {
  Lock lock(mutex());
  pinned()[(const char*)address] = (size_t)size;
}

bool unpin(int64_t address) {
  Lock lock(mutex());
  return pinned().erase((const char*)address) > 0;
}

at::Tensor random_state(int64_t device) {
  return generator_of((int)device).get_state();
}

void set_random_state(const at::Tensor& state, int64_t device) {
  generator_of((int)device).set_state(state);
}

void seed(int64_t value, int64_t device) {
  generator_of((int)device).set_current_seed((uint64_t)value);
}

void before_fork() { // no other thread is in here while the process is copied: in the copy, it would never leave
  acquire(mutex());
}

void after_fork(bool in_child) {
  if (in_child)
    new (&mutex()) std::recursive_mutex; // its owner was a thread of the parent
  else
    mutex().unlock();
}

int64_t count() {
  return device_count();
}

int64_t device_now() {
  return current_device;
}

void set_device(int64_t device) {
  Guard().setDevice({kFake, (c10::DeviceIndex)device});
}

TORCH_LIBRARY(fakegpu, m) {
  m.def("device_count() -> int", &count);
  m.def("current_device() -> int", &device_now);
  m.def("set_device(int device) -> ()", &set_device);
  m.def("set_lag(int lag, bool in_operators) -> ()", &set_lag);
  m.def("tick() -> ()", &tick);
  m.def("occupy(float seconds) -> ()", &occupy);
  m.def("syncs() -> int", &syncs);
  m.def("memory(int device, bool at_most) -> int", &memory);
  m.def("refuse_syncs(bool whether) -> ()", &refuse_syncs);
  m.def("check_races(bool whether) -> ()", &check_races);
  m.def("contexts() -> int[]", &contexts);
  m.def("pin(int address, int size) -> ()", &pin);
  m.def("unpin(int address) -> bool", &unpin);
  m.def("random_state(int device) -> Tensor", &random_state);
  m.def("set_random_state(Tensor state, int device) -> ()", &set_random_state);
  m.def("seed(int value, int device) -> ()", &seed);
  m.def("before_fork() -> ()", &before_fork);
  m.def("after_fork(bool in_child) -> ()", &after_fork);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace
