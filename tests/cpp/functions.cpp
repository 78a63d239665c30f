// C++ Functions, each with both values of `is_traceable`, as pybind functions and as operators with Autograd kernels.
// Their backward is wrong on purpose (by a constant factor), so that a lost backward shows.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/zeros.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

template <bool Traceable>
struct Scale : public Function<Scale<Traceable>> {  // in place; derivative: 10 times the right one
  static constexpr bool is_traceable = Traceable;

  static variable_list forward(AutogradContext* ctx, int64_t n, Tensor var) {
    ctx->saved_data["n"] = n;
    var.mul_(n);
    ctx->mark_dirty({var});
    return {var};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_output) {
    return {Tensor(), grad_output[0] * (10 * ctx->saved_data["n"].toInt())};
  }
};

template <bool Traceable>
struct Relu : public Function<Relu<Traceable>> {  // derivative: 3 x^2 where x > 0, so that there is a second order
  static constexpr bool is_traceable = Traceable;

  static Tensor forward(AutogradContext* ctx, Tensor input) {
    ctx->save_for_backward({input});
    return input.clamp_min(0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    auto input = ctx->get_saved_variables()[0];
    return {grad_outputs[0] * (input > 0).to(grad_outputs[0].scalar_type()) * input * input * 3};
  }
};

// Average of `sampling_ratio`^2 nearest samples per bin; rois are rows (batch, x1, y1, x2, y2).
template <typename Visit>
void each_sample(const Tensor& rois, double scale, int64_t ph, int64_t pw, int64_t ratio, bool aligned, int64_t h,
                 int64_t w, Visit visit) {
  auto roi = rois.accessor<float, 2>();
  double shift = aligned ? 0.5 : 0.0;
  for (int64_t r = 0; r < rois.size(0); r++) {
    double x1 = roi[r][1] * scale - shift, y1 = roi[r][2] * scale - shift;
    double bin_w = (roi[r][3] * scale - shift - x1) / pw, bin_h = (roi[r][4] * scale - shift - y1) / ph;
    for (int64_t i = 0; i < ph * ratio; i++) {
      for (int64_t j = 0; j < pw * ratio; j++) {
        auto y = static_cast<int64_t>(y1 + (i + 0.5) * bin_h / ratio), x = static_cast<int64_t>(x1 + (j + 0.5) * bin_w / ratio);
        if (y >= 0 && y < h && x >= 0 && x < w) visit(r, static_cast<int64_t>(roi[r][0]), i / ratio, j / ratio, y, x);
      }
    }
  }
}

Tensor roi_align_cpu(const Tensor& input, const Tensor& rois, double scale, int64_t ph, int64_t pw, int64_t ratio,
                     bool aligned) {
  auto output = at::zeros({rois.size(0), input.size(1), ph, pw}, input.options());
  auto in = input.accessor<float, 4>();
  auto out = output.accessor<float, 4>();
  each_sample(rois, scale, ph, pw, ratio, aligned, input.size(2), input.size(3),
              [&](int64_t r, int64_t b, int64_t i, int64_t j, int64_t y, int64_t x) {
                for (int64_t c = 0; c < input.size(1); c++) out[r][c][i][j] += in[b][c][y][x] / (ratio * ratio);
              });
  return output;
}

Tensor roi_align_backward_cpu(const Tensor& grad, const Tensor& rois, double scale, int64_t ph, int64_t pw,
                              int64_t ratio, bool aligned, at::IntArrayRef shape) {
  auto result = at::zeros(shape, grad.options());
  auto g = grad.contiguous();
  auto from = g.accessor<float, 4>();
  auto to = result.accessor<float, 4>();
  each_sample(rois, scale, ph, pw, ratio, aligned, shape[2], shape[3],
              [&](int64_t r, int64_t b, int64_t i, int64_t j, int64_t y, int64_t x) {
                for (int64_t c = 0; c < shape[1]; c++) to[b][c][y][x] += 2 * from[r][c][i][j] / (ratio * ratio);
              });
  return result;  // twice the right one
}

template <bool Traceable>
const char* roi_align_name() {
  return Traceable ? "fusegrad_cpp::roi_align_traceable" : "fusegrad_cpp::roi_align_opaque";
}

template <bool Traceable>
Tensor roi_align(const Tensor& input, const Tensor& rois, double scale, int64_t ph, int64_t pw, int64_t ratio,
                 bool aligned) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow(roi_align_name<Traceable>(), "")
                       .template typed<Tensor(const Tensor&, const Tensor&, double, int64_t, int64_t, int64_t, bool)>();
  return op.call(input, rois, scale, ph, pw, ratio, aligned);
}

Tensor roi_align_backward(const Tensor& grad, const Tensor& rois, double scale, int64_t ph, int64_t pw, int64_t ratio,
                          bool aligned, at::IntArrayRef shape) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("fusegrad_cpp::roi_align_backward", "")
                       .typed<decltype(roi_align_backward_cpu)>();
  return op.call(grad, rois, scale, ph, pw, ratio, aligned, shape);
}

template <bool Traceable>
struct RoiAlign : public Function<RoiAlign<Traceable>> {
  static constexpr bool is_traceable = Traceable;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& rois, double scale, int64_t ph,
                               int64_t pw, int64_t ratio, bool aligned) {
    ctx->saved_data["spatial_scale"] = scale;
    ctx->saved_data["pooled_height"] = ph;
    ctx->saved_data["pooled_width"] = pw;
    ctx->saved_data["sampling_ratio"] = ratio;
    ctx->saved_data["aligned"] = aligned;
    ctx->saved_data["input_shape"] = input.sizes();
    ctx->save_for_backward({rois});
    at::AutoDispatchBelowADInplaceOrView guard;
    return {roi_align<Traceable>(input, rois, scale, ph, pw, ratio, aligned)};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_output) {
    auto& kept = ctx->saved_data;
    auto rois = ctx->get_saved_variables()[0];
    auto result = roi_align_backward(grad_output[0], rois, kept["spatial_scale"].toDouble(),
                                     kept["pooled_height"].toInt(), kept["pooled_width"].toInt(),
                                     kept["sampling_ratio"].toInt(), kept["aligned"].toBool(),
                                     kept["input_shape"].toIntVector());
    return {result, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

template <bool Traceable>
Tensor scale_(int64_t n, const Tensor& x) {
  return Scale<Traceable>::apply(n, x)[0];
}

template <bool Traceable>
Tensor relu(const Tensor& x) {
  return Relu<Traceable>::apply(x);
}

template <bool Traceable>
Tensor roi_align_autograd(const Tensor& input, const Tensor& rois, double scale, int64_t ph, int64_t pw, int64_t ratio,
                          bool aligned) {
  return RoiAlign<Traceable>::apply(input, rois, scale, ph, pw, ratio, aligned)[0];
}

Tensor twice(const Tensor& x) {  // C++ without a Function of its own
  return x * 2;
}

}  // namespace

TORCH_LIBRARY(fusegrad_cpp, m) {
  const std::string roi = "(Tensor input, Tensor rois, float scale, int ph, int pw, int ratio, bool aligned) -> Tensor";
  m.def("relu_traceable(Tensor x) -> Tensor");
  m.def("relu_opaque(Tensor x) -> Tensor");
  m.def("relu_composite(Tensor x) -> Tensor", relu<true>);
  m.def("scale_traceable_(int n, Tensor(a!) x) -> Tensor(a!)");
  m.def("scale_opaque_(int n, Tensor(a!) x) -> Tensor(a!)");
  m.def(("roi_align_traceable" + roi).c_str());
  m.def(("roi_align_opaque" + roi).c_str());
  m.def("roi_align_backward(Tensor grad, Tensor rois, float scale, int ph, int pw, int ratio, bool aligned, int[] shape) -> Tensor");
}

TORCH_LIBRARY_IMPL(fusegrad_cpp, Autograd, m) {
  m.impl("relu_traceable", relu<true>);
  m.impl("relu_opaque", relu<false>);
  m.impl("scale_traceable_", scale_<true>);
  m.impl("scale_opaque_", scale_<false>);
  m.impl("roi_align_traceable", roi_align_autograd<true>);
  m.impl("roi_align_opaque", roi_align_autograd<false>);
}

TORCH_LIBRARY_IMPL(fusegrad_cpp, CPU, m) {
  m.impl("roi_align_traceable", roi_align_cpu);
  m.impl("roi_align_opaque", roi_align_cpu);
  m.impl("roi_align_backward", roi_align_backward_cpu);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("relu_traceable", &relu<true>);
  m.def("relu_opaque", &relu<false>);
  m.def("scale_traceable_", &scale_<true>);
  m.def("scale_opaque_", &scale_<false>);
  m.def("roi_align_traceable", &roi_align_autograd<true>);
  m.def("roi_align_opaque", &roi_align_autograd<false>);
  m.def("twice", &twice);
}
