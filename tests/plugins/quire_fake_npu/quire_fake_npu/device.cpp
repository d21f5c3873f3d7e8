// A device that is neither a CPU nor a GPU, on the host's cores: torch's PrivateUse1 under the name `npu`.
//
// Its memory is its own: an operation that gets tensors of the host and of the device is refused. Operations that have no kernel
// here run on the CPU's kernels, over the same memory. A copy to the host that need not be waited for (non_blocking) arrives when
// an event behind it is waited for, not earlier: a program that reads too soon reads what was there before.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <cmath>
#include <deque>
#include <mutex>

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

// Memory.

std::atomic<size_t> in_use{0}, peak{0}, limit{size_t(4) << 30};

struct Block {  // host memory that counts as the device's
  c10::Storage storage;
  ~Block() { in_use -= storage.nbytes(); }
};

c10::DataPtr adopt(c10::Storage storage, int8_t index) {
  const size_t now = in_use += storage.nbytes();
  for (size_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
  }
  void* data = storage.mutable_data();
  return {data, new Block{std::move(storage)}, [](void* block) { delete static_cast<Block*>(block); }, {NPU, index}};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + bytes <= limit, "NPU out of memory: ", bytes, " bytes asked for, ",
                     in_use.load(), " of ", limit.load(), " in use");
    const int8_t index = c10::impl::FakeGuardImpl<NPU>().getDevice().index();
    return adopt(c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetDefaultCPUAllocator()), index);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

// What torch asks of a device outside of its operations: that it is there, and to make a storage larger or smaller.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
} hooks;

at::Tensor with_storage(c10::Storage storage, const at::Tensor& like, c10::DispatchKeySet keys) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The same memory as a tensor of the CPU's.
at::Tensor on_cpu(const at::Tensor& there) {
  const auto& storage = there.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetDefaultCPUAllocator(), true);
  return with_storage(std::move(same), there, c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// A new tensor of the device's that keeps what a CPU kernel made.
c10::Storage adopted(const at::Tensor& result, int8_t index) {
  const size_t bytes = result.storage().nbytes();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, adopt(result.storage(), index), &allocator, true);
}

// Copies to the host that nobody has waited for.

struct Arrival {
  int64_t number;
  at::Tensor target, value;
};
std::mutex mutex;
std::deque<Arrival> arrivals;
int64_t submitted = 0;

void arrive(int64_t until) {
  c10::InferenceMode guard;
  const std::lock_guard<std::mutex> lock(mutex);
  for (; !arrivals.empty() && arrivals.front().number <= until; arrivals.pop_front()) {
    arrivals.front().target.copy_(arrivals.front().value);
  }
}

// Operations.

struct Views {  // an operation's tensors on the device, and the same memory for the CPU's kernels
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  bool on_host = false;

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != NPU) {
      on_host |= tensor.defined() && tensor.dim() > 0;  // a number may come from anywhere
      return tensor;
    }
    return pairs.emplace_back(tensor, on_cpu(tensor)).second;
  }

  at::Tensor back(const at::Tensor& result) {
    for (auto& [there, here] : pairs) {
      if (result.is_same(here)) return there;  // `out` or in place
      if (result.storage().unsafeGetStorageImpl() == here.storage().unsafeGetStorageImpl()) {
        return with_storage(there.storage(), result, KEYS);  // a view
      }
    }
    const int8_t index = pairs.empty() ? 0 : pairs[0].first.device().index();
    return with_storage(adopted(result, index), result, KEYS);
  }

  void take_sizes() {  // of tensors that the kernel resized
    for (auto& [there, here] : pairs) {
      if (there.sizes() == here.sizes() && there.strides() == here.strides()) continue;
      auto* impl = there.unsafeGetTensorImpl();
      if (here.storage().data() != there.storage().data()) {
        impl->set_storage_keep_dtype(adopted(here, there.device().index()));
      }
      impl->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
    }
  }
};

c10::IValue each_tensor(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Views views;
  const auto& schema = op.schema();
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++) {
    (*stack)[i] = each_tensor((*stack)[i], [&](const at::Tensor& tensor) { return views.of(tensor); });
  }
  TORCH_CHECK(views.pairs.empty() || !views.on_host, op.operator_name(), ": tensors of the CPU and of the NPU in one operation");
  const auto& returns = schema.returns();
  if (!returns.empty() && returns[0].type()->kind() != c10::TypeKind::TensorType) arrive(submitted);  // the host gets a number
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  views.take_sizes();
  for (size_t i = stack->size() - returns.size(); i < stack->size(); i++) {
    (*stack)[i] = each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      return tensor.defined() ? views.back(tensor) : tensor;
    });
  }
}

at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const bool to_host = target.is_cpu();
  const at::Tensor from = source.is_cpu() ? source : on_cpu(source);
  if (to_host && non_blocking) {
    const std::lock_guard<std::mutex> lock(mutex);
    arrivals.push_back({++submitted, target, from.clone()});
    return target;
  }
  if (to_host) arrive(submitted);
  (to_host ? target : on_cpu(target)).copy_(from);
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor written = target;
  return copy_(written, source, non_blocking);
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(NPU)));
  return at::detail::empty_generic_symint(sizes, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(NPU)));
  return at::detail::empty_strided_symint_generic(sizes, strides, &allocator, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor& set_(at::Tensor& tensor, c10::Storage storage) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const int64_t count = storage.nbytes() / tensor.itemsize();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_contiguous(count);
  return tensor;
}

// The device's one kernel of its own: x / sqrt(mean(x^2) + eps) * weight for each row, float32.
void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out) {
  const int64_t rows = x.size(0), width = x.size(1);
  const float* scales = weight.const_data_ptr<float>();
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x.const_data_ptr<float>() + row * x.stride(0);
    float* to = out.mutable_data_ptr<float>() + row * out.stride(0);
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += double(from[i]) * from[i];
    const float scale = float(1 / std::sqrt(squares / width + eps));
    for (int64_t i = 0; i < width; i++) to[i] = from[i] * scale * scales[i];
  }
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::FakeGuardImpl<NPU>)

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("set_.source_Storage", set_);
}

TORCH_LIBRARY(quire_fake_npu, m) { m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()"); }

TORCH_LIBRARY_IMPL(quire_fake_npu, PrivateUse1, m) { m.impl("rms_norm", rms_norm); }

extern "C" {
size_t npu_memory_in_use() { return in_use; }
size_t npu_memory_peak() { return peak; }
void npu_start(size_t bytes) {
  limit = bytes;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int64_t npu_submitted() { return submitted; }
void npu_wait(int64_t number) { arrive(number); }
}
