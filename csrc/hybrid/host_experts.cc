#include "hybrid/host_experts.h"

#include <unistd.h>

#include <cstring>
#include <new>

#include "numa/limits.h"

namespace ktft {
namespace {

// How long threads stay awake without work. This bridges the layers of a decode step, and the time between steps.
constexpr auto kSpin = std::chrono::milliseconds(2);
// How long an idle thread sleeps between two polls of the words; nothing wakes it.
constexpr auto kNap = std::chrono::microseconds(50), kLongestNap = std::chrono::microseconds(1000);
constexpr uint32_t kDone = 0;
constexpr size_t kIndexBytes = sizeof(int64_t);

constexpr const char* kOtherProcess =
    "host experts belong to the process this one was forked from: make them in the process that uses them";
constexpr const char* kSlotInUse = "its slot was submitted to while the job before was not done";

// One row: all of a buffer.
RowCopy whole(const void* host, uintptr_t device, size_t bytes) {
  return {.all = reinterpret_cast<uintptr_t>(host), .chosen = device, .bytes = bytes};
}

}  // namespace

HostExperts::HostExperts(std::shared_ptr<Runtime> runtime, std::shared_ptr<CudaDriver> driver, int device,
                         const HostExpertsShape& shape, int activation_bits, Through through)
    : runtime_(std::move(runtime)),
      driver_(std::move(driver)),
      device_(device),
      shape_(shape),
      activation_bits_(activation_bits),
      through_(driver_ ? through : Through::kHostFunctions),
      owner_(getpid()),
      slots_(std::max(shape.slots, 1)) {
  KTFT_CHECK(shape.max_tokens > 0 && shape.hidden > 0 && shape.top_k > 0 && shape.slots > 0, "max_tokens is ",
             shape.max_tokens, ", hidden_size ", shape.hidden, ", top_k ", shape.top_k, ", slots ", shape.slots,
             ": all must be positive");
  const size_t routes = size_t(shape.max_tokens) * shape.top_k, rows = in_lines(row_bytes(shape.max_tokens));
  const size_t index = in_lines(routes * kIndexBytes), weights = in_lines(routes * sizeof(float));
  const size_t numbers = in_lines(size_t(shape.max_tokens) * sizeof(int32_t));
  const size_t bytes = kCacheLine + rows + index + weights + numbers + rows;
  arena_ = NodeBuffer(bytes * slots_.size(), runtime_->node_ids[0]);
  std::memset(arena_.data(), 0, arena_.size());
  for (size_t i = 0; i < slots_.size(); i++) {
    char* const at = arena_.data() + i * bytes;
    Slot& slot = slots_[i];
    slot.word = new (at) std::atomic<uint32_t>(kDone);
    slot.hidden = at + kCacheLine;
    slot.index = slot.hidden + rows;
    slot.weights = slot.index + index;
    slot.of_token = slot.weights + weights;
    slot.out = slot.of_token + numbers;
    slot.wide_index.resize(routes);
    slot.numbers.resize(shape.max_tokens);
  }
  if (driver_) driver_->register_host(device_, reinterpret_cast<uintptr_t>(arena_.data()), arena_.size(), true);
  try {
    start();
  } catch (...) {
    if (driver_) driver_->unregister_host(device_, reinterpret_cast<uintptr_t>(arena_.data()));
    throw;
  }
}

void HostExperts::start() {
  if (through_ == Through::kWords) {
    KTFT_CHECK(driver_->has_words(device_), "streams of CUDA device ", device_,
               " cannot read and write words of host memory: use host_functions");
    for (Slot& slot : slots_) slot.word_on_device = driver_->device_address(device_, slot.word);
  }
  thread_ = start_thread("the thread for experts in the order of a stream", "", [this] { work(); });
  spun_for_ = runtime_->pool.spin_for(kSpin);
}

HostExperts::~HostExperts() {
  try {
    close();
  } catch (const std::exception&) {  // the driver may be gone when the process exits
  }
}

void HostExperts::close() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) return thread_.detach();
  closing_ = true;
  thread_.join();
  runtime_->pool.spin_for(spun_for_);
  const std::lock_guard<std::mutex> lock(mutex_);
  numbered_.clear();
  blocks_.clear();
  if (driver_) driver_->unregister_host(device_, reinterpret_cast<uintptr_t>(arena_.data()));
}

HostExperts::Layer& HostExperts::layer_of(MoeLayer& layer) {
  const int hidden = layer.weights().shape().hidden;
  KTFT_CHECK(hidden == shape_.hidden, layer.name(), ": hidden_size is ", hidden, ", host experts were made for ",
             shape_.hidden);
  return layers_.try_emplace(&layer, layer).first->second;
}

HostExperts::Slot& HostExperts::slot_at(int slot) {
  KTFT_CHECK(slot >= 0 && slot < shape_.slots, "there is no slot ", slot, ", host experts have ", shape_.slots);
  return slots_[slot];
}

void HostExperts::check_open(const MoeLayer& layer) const {
  check_owner(layer);
  KTFT_CHECK(thread_.joinable(), layer.name(), ": host experts are closed");
}

void HostExperts::check_owner(const MoeLayer& layer) const {
  KTFT_CHECK(getpid() == owner_, layer.name(), ": ", kOtherProcess);
}

HostExperts::Block& HostExperts::block_of(MoeLayer& layer, int tokens, int slot, size_t index_bytes, bool adapters) {
  KTFT_CHECK(tokens > 0 && tokens <= shape_.max_tokens, layer.name(), ": ", tokens,
             " tokens, host experts take 1 to max_tokens = ", shape_.max_tokens);
  Slot& place = slot_at(slot);
  const std::lock_guard<std::mutex> lock(mutex_);
  Layer& known = layer_of(layer);
  Block& block = blocks_[{&layer, tokens, slot, index_bytes, adapters}];
  if (!block.owner) {
    block = {.owner = this,
             .number = uint32_t(numbered_.size() + 1),
             .layer = &known,
             .slot = &place,
             .tokens = tokens,
             .index_bytes = index_bytes,
             .adapters = adapters};
    numbered_.push_back(&block);
  }
  return block;
}

void HostExperts::copy(CopyDirection direction, const std::vector<RowCopy>& matrices, uintptr_t stream) {
  if (driver_)
    driver_->copy(device_, direction, {0}, matrices, stream);
  else
    copy_on_host({0}, matrices, direction == CopyDirection::kToDevice, 1);
}

void HostExperts::call_host(void (*fn)(void*), Block& block, uintptr_t stream) {
  if (driver_)
    driver_->call_host(device_, fn, &block, stream);
  else
    fn(&block);
}

void HostExperts::submit(MoeLayer& layer, uintptr_t hidden, uintptr_t index, size_t index_bytes, uintptr_t weights,
                         uintptr_t of_token, int tokens, int slot, uintptr_t stream) {
  check_open(layer);
  Block& block = block_of(layer, tokens, slot, index_bytes, of_token != 0);
  Slot& at = *block.slot;
  if (!at.waited) enqueue_wait(*at.last, stream);  // an error between the two calls has skipped the wait
  const size_t count = size_t(tokens) * shape_.top_k;
  std::vector<RowCopy> inputs{whole(at.hidden, hidden, row_bytes(tokens)), whole(at.index, index, count * index_bytes),
                              whole(at.weights, weights, count * sizeof(float))};
  if (of_token) inputs.push_back(whole(at.of_token, of_token, size_t(tokens) * sizeof(int32_t)));
  copy(CopyDirection::kToHost, inputs, stream);
  enqueue_job(block, stream);
}

HostExperts::Place HostExperts::place(int slot, uintptr_t stream) {
  Slot& at = slot_at(slot);
  if (!at.waited) enqueue_wait(*at.last, stream);
  const auto address = [](const char* memory) { return reinterpret_cast<uintptr_t>(memory); };
  return {address(at.hidden), address(at.index), address(at.weights), address(at.of_token), address(at.out)};
}

void HostExperts::submit_in_place(MoeLayer& layer, int tokens, int slot, size_t index_bytes, bool adapters,
                                  uintptr_t stream) {
  check_open(layer);
  enqueue_job(block_of(layer, tokens, slot, index_bytes, adapters), stream);
}

void HostExperts::enqueue_job(Block& block, uintptr_t stream) {
  if (through_ == Through::kWords)
    driver_->write_word(device_, block.slot->word_on_device, block.number, stream);
  else
    call_host(&HostExperts::submitted, block, stream);
  block.slot->last = &block;
  block.slot->waited = false;
}

void HostExperts::enqueue_wait(Block& block, uintptr_t stream) {
  if (through_ == Through::kWords)
    driver_->wait_for_word(device_, block.slot->word_on_device, kDone, stream);
  else
    call_host(&HostExperts::awaited, block, stream);
  block.slot->waited = true;
}

void HostExperts::wait(MoeLayer& layer, int tokens, int slot, uintptr_t out, uintptr_t stream) {
  wait_in_place(layer, tokens, slot, stream);
  copy(CopyDirection::kToDevice, {whole(slot_at(slot).out, out, row_bytes(tokens))}, stream);
}

void HostExperts::wait_in_place(MoeLayer& layer, int tokens, int slot, uintptr_t stream) {
  check_open(layer);
  Block* const block = slot_at(slot).last;
  KTFT_CHECK(block && block->layer->native == &layer && block->tokens == tokens, layer.name(), ": ", tokens,
             " tokens of it are not what was last submitted to slot ", slot, ", so there is nothing to wait for");
  enqueue_wait(*block, stream);
}

void HostExperts::submitted(void* data) noexcept {
  Block& block = *static_cast<Block*>(data);
  if (block.slot->word->exchange(block.number) == kDone) return;
  block.owner->fail(block.layer->native->name(), kSlotInUse);
}

void HostExperts::awaited(void* data) noexcept {
  const std::atomic<uint32_t>& word = *static_cast<Block*>(data)->slot->word;
  const auto is_done = [&] { return word.load(std::memory_order_acquire) == kDone; };
  while (!spin(kSpin, is_done))
    if (const uint32_t number = word.load()) word.wait(number);
}

void HostExperts::fail(const std::string& where, const char* what) noexcept {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  if (failed_) return;
  try {
    error_ = std::string(what).starts_with(where) ? what : where + ": " + what;
  } catch (...) {  // there was no memory for the text; `failed_` is enough
  }
  failed_ = true;
}

std::string HostExperts::error() const {
  if (getpid() != owner_) return kOtherProcess;
  if (!failed_) return "";
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return error_.empty() ? "out of memory" : error_;
}

void HostExperts::work() {
  runtime_->pool.bind_caller();
  std::chrono::nanoseconds awake = kSpin;
  auto nap = kNap;
  for (size_t at = 0;;) {
    const bool closing = closing_;  // read before polling, so that no submitted job is missed
    Slot* slot = nullptr;
    if (spin(closing ? std::chrono::nanoseconds(0) : awake, [&] { return (slot = next_job(at)) != nullptr; })) {
      run(*slot);
      at = size_t(slot - slots_.data());
      awake = kSpin;
      nap = kNap;
      continue;
    }
    if (closing) return;
    std::this_thread::sleep_for(nap);
    awake = std::chrono::nanoseconds(0);
    nap = std::min(2 * nap, kLongestNap);
  }
}

HostExperts::Slot* HostExperts::next_job(size_t after) {
  for (size_t i = 1; i <= slots_.size(); i++) {
    Slot& slot = slots_[(after + i) % slots_.size()];
    if (slot.word->load(std::memory_order_acquire) != kDone) return &slot;
  }
  return nullptr;
}

void HostExperts::run(Slot& slot) {
  const auto begin = std::chrono::steady_clock::now();
  uint32_t number = slot.word->load(std::memory_order_acquire);
  std::unique_lock<std::mutex> known(mutex_);
  Block& block = *numbered_[number - 1];
  known.unlock();
  {
    const std::lock_guard<std::mutex> lock(run_mutex_);
    if (!failed_) try {
        compute(block);
      } catch (const std::exception& e) {
        fail(block.layer->native->name(), e.what());
      } catch (...) {
        fail(block.layer->native->name(), "the kernels threw something that is no exception");
      }
    if (failed_) std::memset(slot.out, 0, row_bytes(block.tokens));
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    block.layer->nanoseconds.fetch_add(took.count(), std::memory_order_relaxed);
  }
  if (!slot.word->compare_exchange_strong(number, kDone)) fail(block.layer->native->name(), kSlotInUse);
  slot.word->notify_all();
}

void HostExperts::compute(Block& block) {
  Slot& slot = *block.slot;
  Layer& layer = *block.layer;
  const size_t routes = size_t(block.tokens) * shape_.top_k;
  bool any = false;
  for (size_t i = 0; i < routes; i++) {
    const int64_t expert = block.index_bytes == kIndexBytes ? reinterpret_cast<const int64_t*>(slot.index)[i]
                                                            : reinterpret_cast<const int32_t*>(slot.index)[i];
    slot.wide_index[i] = expert;
    any |= expert != kElsewhere;
    if (expert >= 0 && expert < int64_t(layer.counts.size()))
      layer.counts[expert].fetch_add(1, std::memory_order_relaxed);
  }
  if (!any) {  // without waking the pool's threads
    std::memset(slot.out, 0, row_bytes(block.tokens));
    return;
  }
  const LayerInput input{.hidden = slot.hidden,
                         .dtype = shape_.dtype,
                         .top_k_index = slot.wide_index.data(),
                         .top_k_weights = reinterpret_cast<const float*>(slot.weights),
                         .tokens = block.tokens,
                         .top_k = shape_.top_k};
  const std::vector<const Lora*> adapters = adapters_of(block);
  if (adapters.empty())
    layer.native->forward(input, nullptr, Keep::kNothing, activation_bits_, slot.out);
  else
    layer.native->forward_adapters(input, adapters, slot.numbers.data(), activation_bits_, slot.out);
}

std::vector<const Lora*> HostExperts::adapters_of(Block& block) const {
  if (!block.adapters) return {};
  const auto& places = block.layer->adapters;
  std::vector<const Lora*> found;
  std::vector<int> number(places.size(), kNoAdapter);
  const int32_t* const of_token = reinterpret_cast<const int32_t*>(block.slot->of_token);
  for (int t = 0; t < block.tokens; t++) {
    const int32_t place = of_token[t];
    const bool has = place >= 0 && place < int32_t(places.size()) && places[place];
    if (has && number[place] == kNoAdapter) {
      number[place] = int(found.size());
      found.push_back(&*places[place]);
    }
    block.slot->numbers[t] = has ? number[place] : kNoAdapter;
  }
  return found;
}

void HostExperts::set_adapter(MoeLayer& layer, int place, const Lora* lora) {
  check_owner(layer);
  KTFT_CHECK(place >= 0, layer.name(), ": adapters have places from 0 on, not ", place);
  if (lora) layer.check_kept(*lora);
  std::unique_lock<std::mutex> lock(mutex_);
  Layer& known = layer_of(layer);
  lock.unlock();
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    const std::lock_guard<std::mutex> between(run_mutex_);
    if (next_job(0)) continue;
    if (size_t(place) >= known.adapters.size()) known.adapters.resize(place + 1);
    known.adapters[place] = lora ? std::optional<Lora>(*lora) : std::nullopt;
    return;
  }
}

std::vector<int64_t> HostExperts::counts(MoeLayer& layer) {
  check_owner(layer);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Layer& known = layer_of(layer);
  return {known.counts.begin(), known.counts.end()};
}

double HostExperts::seconds(MoeLayer& layer) {
  check_owner(layer);
  const std::lock_guard<std::mutex> lock(mutex_);
  return double(layer_of(layer).nanoseconds.load(std::memory_order_relaxed)) * 1e-9;
}

}  // namespace ktft
