// Tensors that are on `cuda:N` for torch (device, dispatch key, autograd's thread per device), in memory of the CPU.
//
// Registered are a device guard, hooks, an allocator, what makes tensors and views of a storage, and for every other
// operation a boxed fallback: its arguments as tensors of the CPU on the same memory, the CPU's kernel, results renamed.
// While a graph records a stream, what is called on it is written down, and happens when the graph is replayed.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <malloc.h>
#include <map>
#include <mutex>
#include <optional>
#include <set>

using namespace at;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::CppFunction;

namespace {

constexpr int MOST = 8;
int devices = 1;
int64_t most_bytes = 0; // an allocation of more fails; 0: none does
struct Block {
  int pool;
  bool live;
};
std::map<void *, Block> allocated; // by the pool that they are from: 0 is torch's own, those of graphs are FIRST_OF_GRAPHS on
std::mutex books;
constexpr int FIRST_OF_GRAPHS = 100;
thread_local int pool = 0; // from which this thread's allocations are
thread_local DeviceIndex current = 0;
thread_local StreamId streams[MOST] = {0};

// What a graph replays, in its order: one graph records at a time.
using Node = std::function<void()>;
std::map<int, std::vector<Node>> graphs;
int recording = 0, recording_pool = 0;
StreamId recorded_stream = 0;
void (*on_node)(int) = nullptr; // a launch, by its number
bool records() { return recording && streams[current] == recorded_stream; }

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current : index; }

// ------------------------------------------------------------------ the device
struct Guard : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device device) const override { current = or_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = or_current(device.index()); }
  Device exchangeDevice(Device device) const override {
    return Device(kCUDA, std::exchange(current, or_current(device.index())));
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, streams[or_current(device.index())]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override {
    auto device = stream.device();
    return Stream(Stream::UNSAFE, device, std::exchange(streams[device.index()], stream.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(devices); }
  void record(void **event, const Stream &, const DeviceIndex, const EventFlag) const override {
    *event = reinterpret_cast<void *>(1);
  }
  void block(void *, const Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  void destroyEvent(void *, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream &) const override { return true; }
  void synchronizeStream(const Stream &) const override {}
  void synchronizeEvent(void *) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr &, const Stream &) const override {}
};

// Random numbers are the CPU's, by a generator that says it is a device's.
struct DeviceGenerator : c10::GeneratorImpl {
  Generator numbers = at::detail::createCPUGenerator();
  uint64_t offset = 0;
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kCUDA, index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed), offset = 0; }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_offset(uint64_t wanted) override { offset = wanted; }
  uint64_t get_offset() const override { return offset; }
  void set_state(const c10::TensorImpl &state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator *clone_impl() const override {
    auto *made = new DeviceGenerator(device().index());
    made->numbers = numbers.clone();
    return made;
  }
};

struct Hooks : CUDAHooksInterface {
  void init() const override {}
  const Generator &getDefaultGenerator(DeviceIndex index = -1) const override {
    static std::vector<Generator> each = [] {
      std::vector<Generator> made;
      for (DeviceIndex i = 0; i < MOST; i++) made.push_back(make_generator<DeviceGenerator>(i));
      return made;
    }();
    return each[or_current(index)];
  }
  Generator getNewGenerator(DeviceIndex index = -1) const override {
    return make_generator<DeviceGenerator>(or_current(index));
  }
  Device getDeviceFromPtr(void *) const override { return Device(kCUDA, current); }
  bool isPinnedPtr(const void *) const override { return false; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, or_current(device));
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

// Memory of a graph's pool stays mapped for its replays, and is what the next allocations of the pool get.
void give_back(void *place) {
  const std::lock_guard<std::mutex> guard(books);
  auto block = allocated.find(place);
  if (block == allocated.end()) return;
  if (block->second.pool >= FIRST_OF_GRAPHS) {
    block->second.live = false;
    return;
  }
  allocated.erase(block);
  free(place);
}

void require_memory(size_t size) {
  TORCH_CHECK_WITH(OutOfMemoryError, !most_bytes || static_cast<int64_t>(size) <= most_bytes,
                   "CUDA out of memory. Tried to allocate ", size, " bytes.");
}

// A block of a pool that is as large and was given back; nullptr where there is none.
void *again_from(int number, size_t size) {
  for (auto &[place, block] : allocated)
    if (block.pool == number && !block.live && malloc_usable_size(place) / 512 * 512 == size) return place;
  return nullptr;
}

struct Memory : Allocator {
  DataPtr allocate(size_t size) override {
    require_memory(size);
    const std::lock_guard<std::mutex> guard(books);
    auto from = records() ? recording_pool : pool;
    auto rounded = (size + 511) / 512 * 512;
    void *place = size && from >= FIRST_OF_GRAPHS ? again_from(from, rounded) : nullptr;
    if (size && !place && posix_memalign(&place, 512, rounded)) throw std::bad_alloc();
    if (place) allocated[place] = {from, true};
    return {place, place, &give_back, Device(kCUDA, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void *to, const void *from, size_t size) const override { memcpy(to, from, size); }
};
Memory memory;

// Another device within a block.
struct On {
  DeviceIndex before = current;
  explicit On(const std::optional<Device> &device) { current = device ? or_current(device->index()) : current; }
  ~On() { current = before; }
};

// ------------------------------------------------------------------ tensors that share memory, under either name
Tensor alias(const Tensor &tensor, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

Storage storage_of(size_t size, DataPtr place, Allocator *allocator) {
  return Storage(Storage::use_byte_size_t(), size, std::move(place), allocator, false);
}

Tensor as_cpu(const Tensor &tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto size = tensor.storage().nbytes();
  if (!size) return at::empty(tensor.sizes(), TensorOptions().dtype(tensor.dtype()).device(kCPU));
  DataPtr place(tensor.storage().mutable_data(), Device(kCPU)); // not owned: the caller holds the tensor
  auto made = alias(tensor, storage_of(size, std::move(place), nullptr), DispatchKey::CPU);
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}

// What the CPU made, as a device's: where it is, or in the pool that allocations come from. While a graph records, the
// numbers that are in the pool stay: a replay may still read them.
Tensor as_cuda(const Tensor &tensor, Device device) {
  auto size = tensor.storage().nbytes();
  if (pool || records()) {
    auto place = memory.allocate(size);
    if (size && !records()) memcpy(place.get(), tensor.storage().data(), size);
    return alias(tensor, storage_of(size, std::move(place), &memory), DispatchKey::CUDA);
  }
  require_memory(size);
  auto *owner = new Tensor(tensor);
  DataPtr place(tensor.storage().mutable_data(), owner, [](void *kept) { delete static_cast<Tensor *>(kept); }, device);
  return alias(tensor, storage_of(size, std::move(place), &memory), DispatchKey::CUDA);
}

Tensor view_of(const Tensor &tensor, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  Storage storage = tensor.storage();
  auto made = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), tensor.key_set(), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

// ------------------------------------------------------------------ operations that make tensors
using MaybeDtype = std::optional<ScalarType>;
using MaybeLayout = std::optional<Layout>;
using MaybeDevice = std::optional<Device>;
using MaybeFormat = std::optional<MemoryFormat>;
constexpr DispatchKeySet CUDA(DispatchKey::CUDA);

Tensor empty(IntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>, MaybeFormat format) {
  On on(device);
  return at::detail::empty_generic(size, &memory, CUDA, dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, MaybeDtype dtype, MaybeLayout, MaybeDevice device,
                     std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &memory, CUDA, dtype_or_default(dtype));
}

// The tangent of what has none: without memory, and under a key whose kernels look at no memory.
Tensor zero_tensor(IntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  On on(device);
  native::ZeroTensorAllocator nothing(Device(kCUDA, current));
  return at::detail::empty_generic(size, &nothing, CUDA | DispatchKeySet(DispatchKey::ZeroTensor), dtype_or_default(dtype), std::nullopt);
}

Tensor as_strided(const Tensor &tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(tensor, size, stride, offset.value_or(tensor.storage_offset()));
}

Tensor reshape_alias(const Tensor &tensor, IntArrayRef size, IntArrayRef stride) {
  return view_of(tensor, size, stride, tensor.storage_offset());
}

Tensor view(const Tensor &tensor, IntArrayRef size) {
  auto made = as_cpu(tensor).view(size);
  return view_of(tensor, made.sizes(), made.strides(), tensor.storage_offset());
}

Tensor &copy(Tensor &to, const Tensor &from, bool) {
  auto written = as_cpu(to), read = as_cpu(from);
  if (records()) graphs[recording].push_back([=] { written.copy_(read); });
  else written.copy_(read);
  return to;
}

const Tensor &resize(const Tensor &tensor, IntArrayRef size, MaybeFormat) {
  auto *storage = tensor.storage().unsafeGetStorageImpl();
  auto needed = static_cast<size_t>(c10::multiply_integers(size)) * tensor.element_size();
  if (storage->nbytes() < needed) {
    auto place = memory.allocate(needed);
    if (storage->nbytes()) memcpy(place.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(place));
    storage->set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor &set_storage(Tensor &tensor, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

Tensor &set_tensor(Tensor &tensor, const Tensor &from) {
  return set_storage(tensor, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

// ------------------------------------------------------------------ every other operation
// The arguments of one call as the CPU's, and its results as a device's again.
struct Call {
  std::vector<Tensor> given, aliases;
  std::optional<Device> device;

  Tensor lower(const Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!device) device = tensor.device();
    given.push_back(tensor);
    aliases.push_back(as_cpu(tensor));
    return aliases.back();
  }

  IValue lower(const IValue &value) {
    if (value.isTensor()) return lower(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto &tensor : value.toTensorVector()) list.push_back(lower(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(lower(*tensor)) : tensor);
      return list;
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda())
      return value.toGenerator().get<DeviceGenerator>()->numbers;
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      return Device(kCPU);
    }
    return value;
  }

  Tensor raise(const Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (size_t i = 0; i < aliases.size(); i++) // an argument that was written to, or an `out`
      if (tensor.is_same(aliases[i])) return take_shape(given[i], tensor);
    auto *place = tensor.storage().nbytes() ? tensor.storage().data() : nullptr;
    for (size_t i = 0; place && i < aliases.size(); i++) // a view of an argument
      if (place == aliases[i].storage().data())
        return view_of(given[i], tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return as_cuda(tensor, device.value_or(Device(kCUDA, current)));
  }

  static Tensor take_shape(const Tensor &to, const Tensor &from) {
    auto *impl = to.unsafeGetTensorImpl();
    if (!to.storage().nbytes() && from.storage().nbytes())
      impl->set_storage_keep_dtype(as_cuda(from, to.device()).storage());
    impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    return to;
  }

  IValue raise(const IValue &value) {
    if (value.isTensor()) return raise(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const auto &tensor : value.toTensorVector()) list.push_back(raise(tensor));
    return list;
  }
};

void collect(const IValue &value, std::vector<Tensor> &found) {
  if (value.isTensor() && value.toTensor().defined()) found.push_back(value.toTensor());
  if (value.isTensorList())
    for (const auto &tensor : value.toTensorVector()) found.push_back(tensor);
}

// Results are known at once, numbers only when the graph is replayed: then they go where these results are.
struct Recorded {
  const c10::OperatorHandle &operation;
  torch::jit::Stack given;
  std::vector<std::pair<Tensor, std::string>> before; // arguments, and the bytes that a call now must not change

  Recorded(const c10::OperatorHandle &operation, const torch::jit::Stack &stack, const Call &call)
      : operation(operation), given(stack.end() - operation.schema().arguments().size(), stack.end()) {
    for (const auto &each : call.aliases)
      before.emplace_back(each, std::string(static_cast<const char *>(each.storage().data()), each.storage().nbytes()));
  }

  void record(const torch::jit::Stack &stack) {
    for (auto &[tensor, bytes] : before) memcpy(tensor.storage().mutable_data(), bytes.data(), bytes.size());
    std::vector<Tensor> results;
    for (auto &value : torch::jit::last(stack, operation.schema().returns().size())) collect(value, results);
    std::vector<Tensor> places;
    for (const auto &each : results) places.push_back(as_cpu(each));
    graphs[recording].push_back([operation = operation, given = given, places] {
      torch::jit::Stack again(given);
      operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &again);
      std::vector<Tensor> made;
      for (const auto &value : again) collect(value, made);
      for (size_t i = 0; i < made.size(); i++)
        if (made[i].data_ptr() != places[i].data_ptr()) places[i].copy_(made[i]);
    });
  }
};

void by_the_cpu(const c10::OperatorHandle &operation, torch::jit::Stack *stack) {
  Call call;
  for (auto &value : torch::jit::last(*stack, operation.schema().arguments().size()))
    const_cast<IValue &>(value) = call.lower(value);
  std::optional<Recorded> recorded;
  if (records() && call.device) recorded.emplace(operation, *stack, call);
  operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto &value : torch::jit::last(*stack, operation.schema().returns().size()))
    const_cast<IValue &>(value) = call.raise(value);
  if (recorded) recorded->record(*stack);
}

template <class Registrar> void every_operation(Registrar &library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", zero_tensor);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("copy_", copy);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
}

// A torch that was built for CUDA has kernels of its own under the key: the fallback takes their places.
void instead_of_real_kernels(torch::Library &library) {
  static const std::set<std::string> ours = {"empty.memory_format", "empty_strided", "_efficientzerotensor",
      "as_strided", "_reshape_alias", "view", "copy_", "resize_", "set_.source_Storage_storage_offset", "set_.source_Tensor"};
  for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto operation = c10::Dispatcher::singleton().findOp(name);
    auto own = name.name.substr(0, 6) == "aten::" ? name.name.substr(6) : "";
    auto full = name.overload_name.empty() ? own : own + "." + name.overload_name;
    if (own.empty() || !operation || !operation->hasKernelForDispatchKey(DispatchKey::CUDA) || ours.count(full)) continue;
    library.impl(full.c_str(), CppFunction::makeFromBoxedFunction<&by_the_cpu>());
  }
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
[[maybe_unused]] const bool allocates = (SetAllocator(kCUDA, &memory, 255), true);
[[maybe_unused]] const bool hooked = (CUDAHooksRegistry()->Register(
    "CUDAHooks", [](CUDAHooksArgs) -> std::unique_ptr<CUDAHooksInterface> { return std::make_unique<Hooks>(); },
    c10::REGISTRY_PREFERRED), true);

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  instead_of_real_kernels(library);
  every_operation(library);
}

} // namespace

extern "C" {
void pretend_devices(int count) { devices = count < MOST ? count : MOST; }
void pretend_memory(int64_t most) { most_bytes = most; }
void pretend_pool(int number) { pool = number; }
// The blocks of a pool that are in use: how many; at most `most` of their addresses go to `places`.
int pretended_in_pool(int number, void **places, int most) {
  const std::lock_guard<std::mutex> guard(books);
  int count = 0;
  for (const auto &[place, block] : allocated) {
    if (block.pool != number || !block.live) continue;
    if (count++ < most) places[count - 1] = place;
  }
  return count;
}
// Of a pool exactly these blocks are in use.
void pretend_in_pool(int number, void **places, int count) {
  const std::lock_guard<std::mutex> guard(books);
  for (auto &[place, block] : allocated)
    if (block.pool == number) block.live = std::find(places, places + count, place) != places + count;
}
void pretended_give_back(void *place) { give_back(place); }
// A storage gives back what it has and forgets how; from now on it gives back; whether it does.
void pretended_free(c10::StorageImpl *storage) {
  storage->_mutable_data_ptr_no_checks().release_context();
  give_back(storage->mutable_data());
}
void pretend_owner(c10::StorageImpl *storage) {
  auto *place = storage->mutable_data();
  storage->set_data_ptr_noswap(DataPtr(place, place, &give_back, storage->device()));
}
int pretended_owner(c10::StorageImpl *storage) { return storage->data_ptr().get_deleter() == &give_back; }
void pretend_recording(int graph, int pool, int64_t stream) { recording = graph, recording_pool = pool, recorded_stream = stream; }
int pretended_recording() { return records() ? recording : 0; }
void pretend_nodes(void (*launch)(int)) { on_node = launch; }
void pretended_node(int number) { graphs[recording].push_back([number] { on_node(number); }); }
void pretended_replay(int graph) {
  for (const auto &node : graphs[graph]) node();
}
void pretended_forget(int graph) { graphs.erase(graph); }
static const Block *block_of(void *place) {
  auto after = allocated.upper_bound(place);
  if (after == allocated.begin()) return nullptr;
  auto &[begin, block] = *std::prev(after);
  return static_cast<char *>(place) < static_cast<char *>(begin) + malloc_usable_size(begin) ? &block : nullptr;
}
// Whether a byte is in a block that was not given back; in one, or in a pool of a graph's.
int pretended_is_allocated(void *place) {
  const std::lock_guard<std::mutex> guard(books);
  auto block = block_of(place);
  return block && block->live;
}
int pretended_is_mapped(void *place) {
  const std::lock_guard<std::mutex> guard(books);
  return block_of(place) != nullptr;
}
int pretended_device() { return current; }
int pretended_exchange(int index) { return std::exchange(current, or_current(static_cast<DeviceIndex>(index))); }
uint64_t pretended_stream(int index) { return static_cast<uint64_t>(streams[or_current(static_cast<DeviceIndex>(index))]); }
void pretended_set_stream(int index, int64_t stream) { streams[or_current(static_cast<DeviceIndex>(index))] = stream; }
}
