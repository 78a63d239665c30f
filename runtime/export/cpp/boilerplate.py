"""Text that exported C++ sources have in common: small functions, and the CUDA driver opened at run time."""

from __future__ import annotations

HELPERS = [
    (
        "cdiv",
        """
int64_t cdiv(int64_t top, int64_t bottom) {
  return (top + bottom - 1) / bottom;
}
""",
    ),
    (
        "laid_out",
        """
// The tensor with these strides, by which the kernels index, from a multiple of 16 bytes on.
at::Tensor laid_out(const at::Tensor& tensor, at::IntArrayRef strides) {
  bool same = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t axis = 0; axis < tensor.dim(); axis++) {
    same = same && (tensor.size(axis) < 2 || tensor.stride(axis) == strides[axis]);
    TORCH_CHECK_VALUE(strides[axis] != 0 || tensor.size(axis) < 2 || tensor.stride(axis) == 0, "a tensor with strides ",
                      strides, " was exported, this one has ", tensor.strides());
  }
  if (same || tensor.numel() == 0) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}
""",
    ),
    (
        "expect",
        """
// The tensor, if it is one that the kernels were made for, in the layout that they read.
at::Tensor expect(const char* name, const at::Tensor& tensor, at::Device device, at::ScalarType dtype,
                  at::IntArrayRef shape, at::IntArrayRef strides) {
  TORCH_CHECK_VALUE(tensor.device() == device, name, " is on ", tensor.device(), ", and others are on ", device);
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == shape, name, " is ", tensor.scalar_type(),
                    tensor.sizes(), ", and the kernels were exported for ", dtype, shape, ": export them for this too");
  return laid_out(tensor, strides);
}
""",
    ),
    (
        "owned",
        """
// The tensor in memory that nobody else sees, with these strides.
at::Tensor owned(const at::Tensor& tensor, at::IntArrayRef strides) {
  bool alone = tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  if (alone && tensor.strides() == strides) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}
""",
    ),
    (
        "aten",
        """
// The tensors that an operator of ATen returns.
std::vector<at::Tensor> aten(const char* name, const char* overload, std::vector<c10::IValue> arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).callBoxed(arguments);
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && value.toTensor().defined()) results.push_back(value.toTensor());
  }
  return results;
}
""",
    ),
]

DRIVER = """
// ---- Launching. The CUDA driver is opened when the first kernel is launched: this file builds without CUDA.
struct Driver {
  int (*load)(void** module, const void* image);
  int (*find)(void** function, void* module, const char* name);
  int (*set)(void* function, int attribute, int value);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra);
  int (*explain)(int code, const char** text);
  int (*current)(int* device);
  int (*ask)(int* value, int attribute, int device);
  void* library;

  Driver() : library(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    TORCH_CHECK(library, "the CUDA driver cannot be opened: ", dlerror());
    resolve(load, "cuModuleLoadData");
    resolve(find, "cuModuleGetFunction");
    resolve(set, "cuFuncSetAttribute");
    resolve(launch, "cuLaunchKernel");
    resolve(explain, "cuGetErrorString");
    resolve(current, "cuCtxGetDevice");
    resolve(ask, "cuDeviceGetAttribute");
  }

  template <typename Function>
  void resolve(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    TORCH_CHECK(function, "the CUDA driver has no ", name);
  }

  void check(int code, const char* what) const {
    const char* text = "unknown error";
    if (code) explain(code, &text);
    TORCH_CHECK(code == 0, what, ": ", text);
  }

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }
};

struct Kernel {
  const char* name;
  const unsigned char* image;
  unsigned threads, shared, workspace;  // bytes of each program
  std::map<int, void*> loaded = {};  // by device
  std::mutex lock = {};

  void* on(int device) {
    std::lock_guard<std::mutex> guard(lock);
    void*& function = loaded[device];
    if (!function) function = load(device);
    return function;
  }

  void* load(int device) {
    const Driver& driver = Driver::get();
    int tens = 0, ones = 0;
    driver.check(driver.ask(&tens, 75, device), "asking for the compute capability");
    driver.check(driver.ask(&ones, 76, device), "asking for the compute capability");
    TORCH_CHECK(tens == CAPABILITY / 10 && ones >= CAPABILITY % 10, name, " was compiled for compute capability ",
                CAPABILITY, ", this device has ", 10 * tens + ones, ": export it for this one too");
    void *module = nullptr, *function = nullptr;
    driver.check(driver.load(&module, image), name);
    driver.check(driver.find(&function, module, name), name);
    if (shared > 48 << 10) driver.check(driver.set(function, 8, shared), name);  // the most dynamic shared memory
    return function;
  }
};

// What a kernel is given: an address, or a number of 32 bits.
struct Argument {
  Argument(const at::Tensor& tensor) : address(tensor.data_ptr()) {}
  Argument(int64_t given) : number(static_cast<int32_t>(given)) {
    TORCH_CHECK_VALUE(number == given, "a size of ", given, " does not fit the 32 bits that the kernels take");
  }
  union {
    void* address;
    int32_t number;
  };
};

void* current_stream(at::Device device) {
  if (device.is_cpu()) return nullptr;  // in a test whose driver only takes notes
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

void launch(Kernel& kernel, int64_t grid, at::Device device, std::vector<Argument> arguments) {
  if (grid == 0) return;
  TORCH_CHECK_VALUE(grid < int64_t(1) << 31, kernel.name, " would need ", grid, " programs");
  const Driver& driver = Driver::get();
  int index = 0;
  driver.check(driver.current(&index), "asking for the current device");
  // Triton's own two arguments: memory in which programs describe the matrices that they read, and one without use
  at::Tensor workspace;
  if (kernel.workspace) workspace = at::empty({grid * int64_t(kernel.workspace)}, at::dtype(at::kByte).device(device));
  void *described = kernel.workspace ? workspace.data_ptr() : nullptr, *unused = nullptr;
  std::vector<void*> addresses;
  for (Argument& argument : arguments) addresses.push_back(&argument.address);
  addresses.insert(addresses.end(), {&described, &unused});
  driver.check(driver.launch(kernel.on(index), grid, 1, 1, kernel.threads, 1, 1, kernel.shared, current_stream(device),
                             addresses.data(), nullptr),
               kernel.name);
}
"""

COUNTERS = """
// Zeros that a kernel leaves at zero, one set for each stream.
at::Tensor counters(const char* name, int64_t count, at::Device device) {
  static std::map<std::tuple<std::string, int64_t, int, void*>, at::Tensor> known;
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  at::Tensor& found = known[{name, count, device.index(), current_stream(device)}];
  if (!found.defined()) found = at::zeros({count}, at::dtype(at::kInt).device(device));
  return found;
}
"""
