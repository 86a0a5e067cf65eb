#include "moe/layer.h"

#include <atomic>
#include <cstring>

#include "moe/w8a8.h"

namespace ktft {
namespace {

constexpr int kMaxRank = 256;
constexpr const char* kNames[kProjections] = {"gate_proj", "up_proj", "down_proj"};
static_assert(split_rank(kMaxRank) <= kMaxTokens);

void check_matrix(const std::string& name, const char* which, const LoraMatrix& m, int rows, int cols) {
  KTFT_CHECK(m.rows == rows && m.cols == cols, name, ": LoRA ", which, " is [", m.rows, ", ", m.cols,
             "] per expert, expected [", rows, ", ", cols, "]");
}

uint64_t next_number() {
  static std::atomic<uint64_t> next{0};
  return next.fetch_add(1);
}

}  // namespace

ExpertShape MoeLayer::checked(ExpertShape shape, const std::string& name) {
  KTFT_CHECK(shape.experts > 0, name, ": num_experts is ", shape.experts, ", it must be positive");
  KTFT_CHECK(shape.hidden > 0 && shape.hidden % kDimMultiple == 0, name, ": hidden_size is ", shape.hidden,
             ", the kernels need a multiple of ", kDimMultiple);
  KTFT_CHECK(shape.intermediate > 0 && shape.intermediate % kDimMultiple == 0, name, ": moe_intermediate_size is ",
             shape.intermediate, ", the kernels need a multiple of ", kDimMultiple);
  return shape;
}

MoeLayer::MoeLayer(std::shared_ptr<Runtime> runtime, ExpertShape shape, Format format, Swiglu swiglu, bool biases,
                   std::string name)
    : runtime_(std::move(runtime)),
      number_(next_number()),
      name_(std::move(name)),
      swiglu_(swiglu),
      weights_(checked(shape, name_), format, biases, runtime_->node_ids) {
  KTFT_CHECK(swiglu.limit > 0 && swiglu.gate_limit > 0 && swiglu.alpha > 0, name_, ": the activation's limit is ",
             swiglu.limit, ", the gate's ", swiglu.gate_limit, " and its alpha ", swiglu.alpha,
             ", all must be positive");
}

ForkLock MoeLayer::lock_for(int expert) const {
  KTFT_CHECK(expert >= 0 && expert < weights_.shape().experts, name_, ": expert ", expert,
             " does not exist, there are ", weights_.shape().experts);
  return ForkLock(runtime_->mutex);
}

bool MoeLayer::load(int expert, Projection projection, const SourceMatrix& source) {
  const ForkLock lock = lock_for(expert);
  return weights_.load(runtime_->pool, expert, projection, source);
}

void MoeLayer::export_canonical(int expert, Projection projection, uint8_t* out) const {
  const ForkLock lock = lock_for(expert);
  weights_.export_canonical(runtime_->pool, expert, projection, out);
}

void MoeLayer::dequantize(int expert, Projection projection, float* out) const {
  const ForkLock lock = lock_for(expert);
  weights_.dequantize(runtime_->pool, expert, projection, out);
}

void MoeLayer::import_canonical(int expert, Projection projection, const uint8_t* in) {
  const ForkLock lock = lock_for(expert);
  weights_.import_canonical(runtime_->pool, expert, projection, in);
}

void MoeLayer::load_bias(int expert, Projection projection, const float* values, int count) {
  const ForkLock lock = lock_for(expert);
  const int expected = weights_.shape().rows(projection);
  KTFT_CHECK(weights_.biases(), name_, ": this layer was made without biases");
  KTFT_CHECK(count == expected, "its shape is [", count, "], the model's config says [", expected, "]");
  weights_.load_bias(expert, projection, values);
}

void MoeLayer::check_lora(const Lora* lora) const {
  if (!lora) return;
  KTFT_CHECK(lora->dropout >= 0 && lora->dropout < 1, name_, ": lora_dropout is ", lora->dropout,
             ", it must be in [0, 1)");
  for (int p = 0; p < kProjections; p++)
    if (const LoraPair* pair = lora->pair(Projection(p))) {
      KTFT_CHECK(weights_.shape().rows(Projection(p)), name_, ": LoRA is on ", kNames[p],
                 ", which these experts do not have");
      KTFT_CHECK(pair->rank() >= 1 && pair->rank() <= kMaxRank, name_, ": LoRA rank is ", pair->rank(),
                 ", it must be 1 to ", kMaxRank);
      check_matrix(name_, "A", pair->a, pair->rank(), weights_.shape().cols(Projection(p)));
      check_matrix(name_, "B", pair->b, weights_.shape().rows(Projection(p)), pair->rank());
    }
}

Call MoeLayer::call_of(const Routes& routes, const float* top_k_weights, const Lora* lora) const {
  return {.runtime = *runtime_,
          .weights = weights_,
          .routes = routes,
          .top_k_weights = top_k_weights,
          .lora = lora,
          .swiglu = swiglu_,
          .name = name_.c_str()};
}

Lora MoeLayer::keep(const Lora& lora) const {
  check_lora(&lora);
  Routes all;
  for (int e = 0; e < weights_.shape().experts; e++) all.active.push_back(e);
  const ForkLock lock(runtime_->mutex);
  Lora packed = lora;
  const auto kept = keep_lora(call_of(all, nullptr, &lora));
  kept->layer = number_;
  packed.kept = kept;
  for (auto& pair : packed.pairs)
    if (pair) pair->a.data = pair->b.data = nullptr;
  return packed;
}

void MoeLayer::check_bits(int activation_bits, Keep keep) const {
  KTFT_CHECK(activation_bits == 8 || activation_bits == 16, name_, ": activation_bits is ", activation_bits,
             ", it must be 16 (bf16) or 8 (int8)");
  if (activation_bits == 16) return;
  KTFT_CHECK(
      keep == Keep::kNothing, name_, ": activation_bits is 8, but activation is ",
      keep == Keep::kRoutes ? "recompute" : "retain",
      " for a backward, which 8-bit activations do not have: pass activation=\"none\", or leave activation_bits at 16");
  if (!rounds_groups()) check_w8a8(name_.c_str(), runtime_->isa, weights_);
}

bool MoeLayer::rounds_groups() const { return strip_kernels(runtime_->isa, weights_.format()).bytes; }

void MoeLayer::set_bits(Call& call, int activation_bits) const {
  call.int8 = activation_bits == 8 && !rounds_groups();
  call.activation_bits = activation_bits;
}

std::shared_ptr<Saved> MoeLayer::prepare(const int64_t* top_k_index, int tokens, int top_k) const {
  const auto saved = std::make_shared<Saved>(runtime_, number_);
  saved->routes = route(top_k_index, tokens, top_k, weights_.shape().experts);
  return saved;
}

std::shared_ptr<Saved> MoeLayer::forward(const LayerInput& input, const Lora* lora, Keep keep, int activation_bits,
                                         void* out) {
  check_lora(lora);
  check_bits(activation_bits, keep);
  const auto saved = prepare(input.top_k_index, input.tokens, input.top_k);
  if (input.tokens > 0) {
    const ForkLock lock(runtime_->mutex);
    Call call = call_of(saved->routes, input.top_k_weights, lora);
    set_bits(call, activation_bits);
    ktft::forward(call, {input.hidden, input.dtype}, out, keep == Keep::kNothing ? nullptr : saved.get(),
                  keep == Keep::kActivations);
  }
  return keep == Keep::kNothing ? nullptr : saved;
}

void MoeLayer::check_kept(const Lora& lora) const {
  KTFT_CHECK(lora.kept && lora.kept->layer == number_ && !lora.drops(), name_,
             ": an adapter was not kept by this layer, or has dropout");
}

void MoeLayer::forward_adapters(const LayerInput& input, std::vector<const Lora*> loras, const int32_t* of_token,
                                int activation_bits, void* out) {
  check_bits(activation_bits, Keep::kNothing);
  for (const Lora* lora : loras) check_kept(*lora);
  for (int t = 0; t < input.tokens; t++)
    KTFT_CHECK(of_token[t] >= kNoAdapter && of_token[t] < int(loras.size()), name_, ": token ", t, " has adapter ",
               of_token[t], ", there are ", loras.size());
  if (input.tokens == 0) return;
  const Routes routes = route(input.top_k_index, input.tokens, input.top_k, weights_.shape().experts);
  Adapters adapters{.loras = std::move(loras), .of_token = of_token};
  adapters.find(routes);
  const ForkLock lock(runtime_->mutex);
  Call call = call_of(routes, input.top_k_weights, nullptr);
  call.adapters = &adapters;
  set_bits(call, activation_bits);
  ktft::forward(call, {input.hidden, input.dtype}, out, nullptr, false);
}

void MoeLayer::check_saved(const Saved& saved, const Lora* lora, const BackwardArgs& args) const {
  KTFT_CHECK(saved.layer == number_, name_, ": what backward was given of forward comes from another layer");
  KTFT_CHECK(saved.routes.tokens == args.tokens && saved.routes.top_k == args.top_k, name_, ": forward had ",
             saved.routes.tokens, " tokens with ", saved.routes.top_k, " experts each, backward has ", args.tokens,
             " with ", args.top_k);
  for (int p = 0; saved.retained && p < kProjections; p++) {
    const LoraPair* const pair = lora ? lora->pair(Projection(p)) : nullptr;
    const int rank = pair ? pair->rank() : 0;
    KTFT_CHECK(saved.ranks[p] == rank, name_, ": forward had LoRA of rank ", saved.ranks[p], " on ", kNames[p],
               ", backward has rank ", rank, " (0 stands for none)");
  }
}

void MoeLayer::backward(Saved& saved, const float* top_k_weights, const Lora* lora, const BackwardArgs& args) {
  check_lora(lora);
  check_saved(saved, lora, args);
  const ForkLock lock(runtime_->mutex);
  Call call = call_of(saved.routes, top_k_weights, lora);
  if (saved.routes.tokens == 0) {
    if (lora) zero_idle_gradients(call);
    return;
  }
  ktft::backward(call, saved, args);
}

}  // namespace ktft
