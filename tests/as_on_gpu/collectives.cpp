// Collectives for the simulated accelerator ("fakenccl"): gloo's, on the memory of device tensors, and as NCCL's to the
// program:
// - they take tensors of the device only;
// - a rank whose peers are gone is told nothing: it waits until somebody ends it, or aborts the collectives;
// - an abort frees who waits, without an error: the results are arbitrary (here: NaN), and the next collective raises;
// - the average of a reduction is there, as it is not with gloo.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <sys/socket.h>

#include <condition_variable>
#include <limits>
#include <mutex>
#include <thread>

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().type() == c10::DeviceType::PrivateUse1, "No backend type associated with device type ",
      tensor.device().type(), ": fakenccl takes tensors of a device only");
  return at::from_blob(
      tensor.numel() ? tensor.mutable_data_ptr() : nullptr, tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU));
}

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& each : tensors) hosts.push_back(on_host(each));
  return hosts;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& each : lists) hosts.push_back(on_host(each));
  return hosts;
}

class Fate { // of a group
 public:
  void abort() {
    std::unique_lock<std::mutex> lock(mutex_);
    aborted_ = true;
    came_.notify_all();
  }
  bool is_aborted() {
    std::unique_lock<std::mutex> lock(mutex_);
    return aborted_;
  }
  void wait_for_abort() {
    std::unique_lock<std::mutex> lock(mutex_);
    came_.wait(lock, [&] { return aborted_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  bool aborted_ = false;
};

class Collective final : public Work {
 public:
  Collective(
      std::vector<WorkPtr> parts, Tensors outputs, std::function<void()> finish, std::shared_ptr<Fate> fate)
      : Work(-1, c10d::OpType::UNKNOWN), parts_(std::move(parts)), outputs_(std::move(outputs)),
        finish_(std::move(finish)), fate_(std::move(fate)) {
    std::vector<c10::Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_[0].device());
    auto type = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
  }

  void begin() { // apart from the constructor: it needs a pointer to this
    auto self = c10::intrusive_ptr<Collective>::unsafe_reclaim_from_nonowning(this);
    std::thread([self] { // not by futures: not all of gloo's have one
      try {
        for (auto& part : self->parts_) part->wait();
        if (self->finish_) self->finish_();
      } catch (const std::exception&) { // nobody hears of it
        self->fate_->wait_for_abort();
        for (auto& each : on_host(self->outputs_))
          if (each.is_floating_point()) each.fill_(std::numeric_limits<double>::quiet_NaN());
      }
      self->done();
    }).detach();
  }

  bool isCompleted() override {
    std::unique_lock<std::mutex> lock(waiting_);
    return done_;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> lock(waiting_);
    came_.wait(lock, [&] { return done_; });
    return true;
  }
  void synchronize() override {
    wait(std::chrono::milliseconds(0));
  }
  Tensors result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  void done() {
    {
      std::unique_lock<std::mutex> lock(waiting_);
      done_ = true;
      came_.notify_all();
    }
    future_->markCompleted(c10::IValue(outputs_));
  }

  std::vector<WorkPtr> parts_;
  Tensors outputs_;
  std::function<void()> finish_;
  std::shared_ptr<Fate> fate_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex waiting_;
  std::condition_variable came_;
  bool done_ = false;
};

class FakeNccl final : public c10d::Backend {
 public:
  FakeNccl(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> sockets)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), sockets_(std::move(sockets)) {}

  const std::string getBackendName() const override {
    return "fakenccl";
  }
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    gloo_->setGroupUid(uid);  // which records what is called, and in what group
  }
  void abort() override {
    if (fate_->is_aborted()) return;
    fate_->abort();
    for (int each : sockets_) { // gloo's own abort frees nobody
      sockaddr_storage peer;
      socklen_t size = sizeof(peer);
      if (::getpeername(each, (sockaddr*)&peer, &size) == 0) ::shutdown(each, SHUT_RDWR); // not one that listens
    }
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    together_ = Together{};
  }
  WorkPtr endCoalescing() override {
    auto all = std::move(*together_);
    together_.reset();
    auto finish = [parts = all.finish] {
      for (auto& each : parts)
        if (each) each();
    };
    return give(std::move(all.parts), std::move(all.outputs), finish);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return one(gloo().broadcast(hosts, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = on_host(tensors);
    auto own = options;
    auto finish = average(own.reduceOp, hosts);
    return one(gloo().allreduce(hosts, own), tensors, finish);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<WorkPtr> parts;
    std::vector<std::function<void()>> finishes;
    for (auto& each : tensors) {
      Tensors hosts{on_host(each)};
      c10d::AllreduceOptions own = options;
      finishes.push_back(average(own.reduceOp, hosts));
      parts.push_back(gloo().allreduce(hosts, own));
    }
    return give(std::move(parts), tensors, [finishes] {
      for (auto& each : finishes)
        if (each) each();
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = on_host(tensors);
    auto own = options;
    auto finish = average(own.reduceOp, hosts);
    return one(gloo().reduce(hosts, own), tensors, finish);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return one(gloo().allgather(to, from, options), outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return one(gloo()._allgather_base(to, from, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<WorkPtr> parts;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto to = on_host(outputs[i]), from = on_host(inputs[i]);
      parts.push_back(gloo()._allgather_base(to, from, options));
    }
    return give(std::move(parts), outputs, nullptr);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return one(gloo().gather(to, from, options), outputs.empty() ? inputs : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return one(gloo().scatter(to, from, options), outputs);
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    auto own = options;
    auto finish = average(own.reduceOp, to);
    return one(gloo().reduce_scatter(to, from, own), outputs, finish);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    auto own = options;
    auto finish = average(own.reduceOp, {to});
    return one(gloo()._reduce_scatter_base(to, from, own), {output}, finish);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<WorkPtr> parts;
    std::vector<std::function<void()>> finishes;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto to = on_host(outputs[i]), from = on_host(inputs[i]);
      auto own = options;
      finishes.push_back(average(own.reduceOp, {to}));
      parts.push_back(gloo()._reduce_scatter_base(to, from, own));
    }
    return give(std::move(parts), outputs, [finishes] {
      for (auto& each : finishes)
        if (each) each();
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return one(gloo().alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return one(gloo().send(hosts, rank, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto hosts = on_host(tensors);
    return one(gloo().recv(hosts, rank, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions own;
    own.timeout = options.timeout;
    return one(gloo().barrier(own), {});
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

 private:
  struct Together {
    std::vector<WorkPtr> parts;
    Tensors outputs;
    std::vector<std::function<void()>> finish;
  };

  c10d::Backend& gloo() {
    TORCH_CHECK_WITH(
        DistBackendError, !fate_->is_aborted(), "NCCL communicator was aborted on rank ", getRank(), ".");
    return *gloo_;
  }

  std::function<void()> average(c10d::ReduceOp& op, Tensors hosts) {
    if (op != c10d::ReduceOp::AVG) return nullptr;
    op = c10d::ReduceOp::SUM;
    return [hosts, size = getSize()] {
      for (auto each : hosts) at::isIntegralType(each.scalar_type(), false) ? each.floor_divide_(size) : each.div_(size);
    };
  }

  WorkPtr one(WorkPtr part, const Tensors& outputs, std::function<void()> finish = nullptr) {
    if (together_) {
      together_->parts.push_back(part);
      together_->outputs.insert(together_->outputs.end(), outputs.begin(), outputs.end());
      together_->finish.push_back(finish);
    }
    return give({std::move(part)}, outputs, together_ ? nullptr : std::move(finish));
  }

  WorkPtr give(std::vector<WorkPtr> parts, Tensors outputs, std::function<void()> finish) {
    auto whole = c10::make_intrusive<Collective>(std::move(parts), std::move(outputs), std::move(finish), fate_);
    whole->begin();
    return whole;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::vector<int> sockets_;
  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  std::optional<Together> together_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");
  py::class_<FakeNccl, c10d::Backend, c10::intrusive_ptr<FakeNccl>>(m, "FakeNccl")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> sockets) {
        return c10::make_intrusive<FakeNccl>(std::move(gloo), std::move(sockets));
      }));
}
