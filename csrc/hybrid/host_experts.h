// Runs experts in CPU memory in the order of a CUDA stream, so that they can be captured in CUDA graphs. For one layer,
// the stream copies hidden states and routing to the host and writes the job's number to a word that a thread here
// polls. Later in the stream, it waits until the word is 0 again, when the job is done, and copies the sum back.
//
// Graphs hold raw pointers, so all memory that they use exists before them and stays until close(): the arena, sized
// for the largest call, and one argument block for each (layer, tokens, slot) that was ever submitted.
//
// The GPU itself writes and reads the words. Where it cannot, host functions do, which do not take the GIL, call CUDA
// or throw. CUDA may run all host functions of a process on one thread, so a wait can delay those of other streams, but
// not for ever: its job is already with the thread here, which needs neither CUDA nor Python.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "cuda/driver.h"
#include "moe/layer.h"

namespace ktft {

// What writes and reads a slot's word in stream order: the GPU, or host functions.
enum class Through { kWords, kHostFunctions };

struct HostExpertsShape {
  int max_tokens, hidden, top_k;
  Dtype dtype;
  int slots;
};

class HostExperts {
 public:
  // Without a driver, calls have completed when they return, and addresses are the host's.
  HostExperts(std::shared_ptr<Runtime> runtime, std::shared_ptr<CudaDriver> driver, int device,
              const HostExpertsShape& shape, int activation_bits, Through through);
  ~HostExperts();

  // Both enqueue work on the stream. Addresses are on its device: hidden and out [tokens, hidden]; index [tokens,
  // top_k] of index_bytes, 4 or 8; weights [tokens, top_k] fp32; of_token [tokens] int32, each token's adapter by its
  // place, or kNoAdapter: 0 if no token has one. A slot is free for the next submit once the wait for its last job has
  // passed in stream order. If that wait was never enqueued, submit enqueues it.
  void submit(MoeLayer& layer, uintptr_t hidden, uintptr_t index, size_t index_bytes, uintptr_t weights,
              uintptr_t of_token, int tokens, int slot, uintptr_t stream);
  void wait(MoeLayer& layer, int tokens, int slot, uintptr_t out, uintptr_t stream);

  // The same for work of the stream that itself writes a call's inputs into the slot and reads its output there, which
  // saves four copies, each of which costs a layer microseconds. `place` comes first: it enqueues the wait for a job
  // that nobody waited for, and says where they lie.
  struct Place {
    uintptr_t hidden, index, weights, of_token, out;
  };
  Place place(int slot, uintptr_t stream);
  void submit_in_place(MoeLayer& layer, int tokens, int slot, size_t index_bytes, bool adapters, uintptr_t stream);
  void wait_in_place(MoeLayer& layer, int tokens, int slot, uintptr_t stream);

  // Gives the tokens of this place an adapter from the next job on, one that the layer has kept; null takes it away.
  // Waits until no job is queued.
  void set_adapter(MoeLayer& layer, int place, const Lora* lora);

  // The first error of a job, or empty. After an error no job computes anything, and all outputs are zero. A forked
  // child does not have the thread: there, this says so, and all other calls except close() throw.
  std::string error() const;

  // The number of tokens that each expert got here, and the seconds of the layer's jobs, since its first use.
  std::vector<int64_t> counts(MoeLayer& layer);
  double seconds(MoeLayer& layer);

  size_t arena_bytes() const { return arena_.size(); }

  // Ends the thread after all submitted jobs and releases the memory. No stream may use any of it afterwards.
  void close();

 private:
  struct Layer {
    MoeLayer* native;
    std::vector<std::optional<Lora>> adapters;  // by place; tokens of an empty one have none here
    std::vector<std::atomic<int64_t>> counts;   // tokens of each expert
    std::atomic<int64_t> nanoseconds{0};

    explicit Layer(MoeLayer& layer) : native(&layer), counts(layer.weights().shape().experts) {}
  };
  struct Block;
  struct Slot {
    std::atomic<uint32_t>* word;  // number of the block whose job is pending, or 0; in the arena
    uintptr_t word_on_device = 0;
    char *hidden, *index, *weights, *of_token, *out;
    std::vector<int64_t> wide_index;
    std::vector<int32_t> numbers;       // of each token's adapter among those that a job uses
    std::atomic<Block*> last{nullptr};  // the last block whose job was enqueued
    std::atomic<bool> waited{true};     // whether its wait was enqueued too
  };
  struct Block {
    HostExperts* owner;
    uint32_t number;  // starting at 1
    Layer* layer;
    Slot* slot;
    int tokens;
    size_t index_bytes;
    bool adapters;  // whether the job has each token's adapter
  };

  size_t row_bytes(int tokens) const { return size_t(tokens) * shape_.hidden * dtype_bytes(shape_.dtype); }
  Layer& layer_of(MoeLayer& layer);
  Slot& slot_at(int slot);
  Block& block_of(MoeLayer& layer, int tokens, int slot, size_t index_bytes, bool adapters);
  void check_owner(const MoeLayer& layer) const;
  void check_open(const MoeLayer& layer) const;
  void copy(CopyDirection direction, const std::vector<RowCopy>& matrices, uintptr_t stream);
  void call_host(void (*fn)(void*), Block& block, uintptr_t stream);
  void enqueue_job(Block& block, uintptr_t stream);
  void enqueue_wait(Block& block, uintptr_t stream);
  void start();
  static void submitted(void* block) noexcept;
  static void awaited(void* block) noexcept;
  void fail(const std::string& where, const char* what) noexcept;
  void work();
  Slot* next_job(size_t after);
  void run(Slot& slot);
  void compute(Block& block);
  std::vector<const Lora*> adapters_of(Block& block) const;

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<CudaDriver> driver_;
  const int device_;
  const HostExpertsShape shape_;
  const int activation_bits_;
  const Through through_;
  const long owner_;  // process that has the thread; forked children do not
  std::chrono::nanoseconds spun_for_;
  NodeBuffer arena_;
  std::vector<Slot> slots_;

  std::mutex mutex_;  // guards the containers below; their elements never move
  std::unordered_map<MoeLayer*, Layer> layers_;
  std::map<std::tuple<MoeLayer*, int, int, size_t, bool>, Block> blocks_;
  std::vector<Block*> numbered_;  // element i is block number i + 1

  std::mutex run_mutex_;  // held while a job runs
  std::atomic<bool> closing_{false};

  std::atomic<bool> failed_{false};
  mutable std::mutex error_mutex_;
  std::string error_;
  std::thread thread_;
};

}  // namespace ktft
