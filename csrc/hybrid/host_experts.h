// Experts in CPU memory as work in the order of a CUDA stream, captured in CUDA graphs like any other. A stream's part
// of a layer is: copies of hidden states and routing to the host, the job's number written to a word that a thread here
// looks at, then, later in the stream, a wait until the word is 0 again, the job done, and the copy of the sum back.
//
// Graphs hold raw pointers, so all memory they see is made before and stays until close(): the arena, sized to the
// largest call, and one argument block for each (layer, tokens, slot) that was ever submitted.
//
// The GPU itself writes and reads the words. Where it cannot, host functions do: they take no GIL, call no CUDA and
// throw nothing. CUDA may run all of a process's on one thread. A wait there can hold up other streams' host functions,
// yet never for ever: a job is with its thread, which needs neither CUDA nor Python, before the wait that follows it in
// stream order begins.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "cuda/driver.h"
#include "moe/layer.h"

namespace ktft {

// Who writes and reads a slot's word in stream order.
enum class Through { kWords, kHostFunctions };

struct HostExpertsShape {
  int max_tokens, hidden, top_k;
  Dtype dtype;
  int slots;
};

struct DeviceRoutes {  // addresses on the stream's device
  uintptr_t hidden;    // [tokens, hidden]
  uintptr_t index;     // [tokens, top_k]
  size_t index_bytes;  // of one: 4 or 8
  uintptr_t weights;   // [tokens, top_k] fp32
  int tokens;
};

class HostExperts {
 public:
  // Without a driver, calls are done when they return and addresses are the host's.
  HostExperts(std::shared_ptr<Runtime> runtime, std::shared_ptr<CudaDriver> driver, int device,
              const HostExpertsShape& shape, int activation_bits, Through through);
  ~HostExperts();
  HostExperts(const HostExperts&) = delete;
  HostExperts& operator=(const HostExperts&) = delete;

  // Enqueue. A slot is free for the next submit once the wait for the last has passed in stream order; a job that was
  // never waited for is then.
  void submit(MoeLayer& layer, const DeviceRoutes& routes, int slot, uintptr_t stream);
  void wait(MoeLayer& layer, int tokens, int slot, uintptr_t out, uintptr_t stream);

  // From the next job on, packed here; null for none. Waits until no job is queued.
  void set_lora(MoeLayer& layer, const Lora* lora);

  // The first error of a job, or empty. After it no job computes anything, and all outputs are zero. A forked child
  // has no thread here: this says so there, and all other calls but close() throw.
  std::string error() const;

  // Since the layer was first seen: tokens that each expert got here, and seconds of its jobs.
  std::vector<int64_t> counts(MoeLayer& layer);
  double seconds(MoeLayer& layer);

  size_t arena_bytes() const { return arena_.size(); }

  // Ends the thread after what was submitted, and gives the memory back: no stream may still hold anything of it.
  void close();

 private:
  struct Layer {
    MoeLayer* native;
    std::optional<Lora> lora;
    std::vector<std::atomic<int64_t>> counts;  // by expert
    std::atomic<int64_t> nanoseconds{0};

    explicit Layer(MoeLayer& layer) : native(&layer), counts(layer.weights().shape().experts) {}
  };
  struct Block;
  struct Slot {
    std::atomic<uint32_t>* word;  // the number of the block whose job is not done yet, or 0; in the arena
    uintptr_t word_on_device = 0;
    char *hidden, *index, *weights, *out;
    std::vector<int64_t> wide_index;
    std::atomic<Block*> last{nullptr};  // enqueued
    std::atomic<bool> waited{true};     // and its wait too
  };
  struct Block {
    HostExperts* owner;
    uint32_t number;  // from 1 on
    Layer* layer;
    Slot* slot;
    int tokens;
    size_t index_bytes;
  };

  Layer& layer_of(MoeLayer& layer);
  Slot& slot_at(int slot);
  Block& block_of(MoeLayer& layer, int tokens, int slot, size_t index_bytes);
  void check_owner(const MoeLayer& layer) const;
  void check_open(const MoeLayer& layer) const;
  void copy(CopyDirection direction, const std::vector<RowCopy>& matrices, uintptr_t stream);
  void call_host(void (*fn)(void*), Block& block, uintptr_t stream);
  void enqueue_wait(Block& block, uintptr_t stream);
  void start();
  static void submitted(void* block) noexcept;
  static void awaited(void* block) noexcept;
  void fail(const std::string& where, const char* what) noexcept;
  void work();
  Slot* next_job(size_t after);
  void run(Slot& slot);
  void compute(Block& block);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<CudaDriver> driver_;
  const int device_;
  const HostExpertsShape shape_;
  const int activation_bits_;
  const Through through_;
  const long owner_;  // a forked child has no thread
  std::chrono::nanoseconds spun_for_;
  NodeBuffer arena_;
  std::vector<Slot> slots_;

  std::mutex mutex_;  // of what follows, whose elements stay where they are
  std::unordered_map<MoeLayer*, std::unique_ptr<Layer>> layers_;
  std::map<std::tuple<MoeLayer*, int, int, size_t>, std::unique_ptr<Block>> blocks_;
  std::vector<Block*> numbered_;  // block i + 1

  std::mutex run_mutex_;  // held while a job runs
  std::atomic<bool> closing_{false};

  std::atomic<bool> failed_{false};
  mutable std::mutex error_mutex_;
  std::string error_;
  std::thread thread_;
};

}  // namespace ktft
