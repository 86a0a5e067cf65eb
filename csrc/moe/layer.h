// One MoE layer's routed experts. Arrays belong to the caller and are contiguous. Calls on one Runtime take turns.
#pragma once

#include <memory>
#include <string>

#include "moe/passes.h"

namespace ktft {

struct LayerInput {
  const void* hidden;  // [tokens, hidden]
  Dtype dtype;
  const int64_t* top_k_index;  // [tokens, top_k]
  const float* top_k_weights;  // [tokens, top_k]
  int tokens, top_k;
};

class MoeLayer {
 public:
  // Throws if the kernels do not support the dimensions or the activation's constants.
  MoeLayer(std::shared_ptr<Runtime> runtime, ExpertShape shape, Format format, Swiglu swiglu, bool biases,
           std::string name);

  // Returns the shape. Throws if the kernels do not support it.
  static ExpertShape checked(ExpertShape shape, const std::string& name);

  const PackedExperts& weights() const { return weights_; }
  const std::string& name() const { return name_; }
  // Packs the adapters for all forward calls of this layer that follow. The memory of `lora` is not read again. Throws
  // if the adapters do not fit the layer, as forward and backward do.
  Lora keep(const Lora& lora) const;
  bool load(int expert, Projection projection, const SourceMatrix& source);
  void load_bias(int expert, Projection projection, const float* values, int count);
  void export_canonical(int expert, Projection projection, uint8_t* out) const;
  void dequantize(int expert, Projection projection, float* out) const;
  void import_canonical(int expert, Projection projection, const uint8_t* in);

  // Writes out [tokens, hidden] in input.dtype. Returns what backward needs, or null with kNothing. activation_bits are
  // 16, or 8 (w8a8.h).
  std::shared_ptr<Saved> forward(const LayerInput& input, const Lora* lora, Keep keep, int activation_bits, void* out);

  // Forward with an adapter for each token, one of `loras` by its number in of_token [tokens], or kNoAdapter. All are
  // kept by this layer. No backward follows.
  void forward_adapters(const LayerInput& input, std::vector<const Lora*> loras, const int32_t* of_token,
                        int activation_bits, void* out);

  // Throws unless an adapter can be one of those of forward_adapters.
  void check_kept(const Lora& lora) const;

  // Returns what forward returns with kRoutes, without computing anything.
  std::shared_ptr<Saved> prepare(const int64_t* top_k_index, int tokens, int top_k) const;

  // Throws if `saved` belongs to another layer, has other sizes, or was retained with adapters of other ranks.
  void backward(Saved& saved, const float* top_k_weights, const Lora* lora, const BackwardArgs& args);

 private:
  // Holds the runtime's mutex. Throws if the expert does not exist.
  ForkLock lock_for(int expert) const;
  void check_lora(const Lora* lora) const;
  void check_bits(int activation_bits, Keep keep) const;
  bool rounds_groups() const;  // whether 8-bit activations have a scale for every 32 columns, in place of w8a8.h
  void set_bits(Call& call, int activation_bits) const;
  void check_saved(const Saved& saved, const Lora* lora, const BackwardArgs& args) const;
  Call call_of(const Routes& routes, const float* top_k_weights, const Lora* lora) const;

  std::shared_ptr<Runtime> runtime_;
  const uint64_t number_;  // unique among the process's layers
  std::string name_;
  Swiglu swiglu_;
  PackedExperts weights_;
};

}  // namespace ktft
