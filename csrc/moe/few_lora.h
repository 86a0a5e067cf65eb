// LoRA of adapters on the few rows of few_rows.cc: B (A x), where A x is computed by tasks of its own for gate and up,
// and by the thread that finishes an expert's h for down.
#pragma once

#include <atomic>
#include <initializer_list>
#include <vector>

#include "moe/call.h"

namespace ktft {

class FewLora {
 public:
  // For a call with adapters.
  explicit FewLora(const Call& call);

  // What it needs for its rows, and where.
  size_t bytes() const;
  void take(char* memory);

  // Prepares a token's row, [hidden].
  void place(int token, const bf16* row);
  // One part of A x for gate and up; tokens must have been placed. No task waits.
  int tasks() const { return int(jobs_.size()); }
  void low_rank(int task);
  // All of A h of an expert's rows, whose h are `narrow` bytes apart; `h` is that of row 0 of the call.
  void hidden_low_rank(const RowChunk& expert, const char* h, size_t narrow);
  // Waits until A x of these rows is known, if p is not down.
  void await_low_rank(const RowChunk& expert) const;
  // Adds B (A x) to 16 outputs of one row, before row scales.
  void add(Projection p, const RowChunk& expert, int row, int strip, float* results) const;

 private:
  struct Job {  // 16 ranks of one adapter on one expert
    int expert, adapter;
    Projection p;
    int block;
  };

  const LoraPair* pair(int adapter, Projection p) const { return call_.adapters->loras[adapter]->pair(p); }
  char* hidden_row(int row) const { return hidden_rows_ + row * kernels_.row_bytes(width_); }
  bf16* operand(Projection p, int row) const;
  char* placed(Projection p, int row) const;
  void multiply(const Job& job, const std::vector<const void*>& x_of_row);
  void place_operands(const RowChunk& expert, std::initializer_list<Projection> projections);

  const Call& call_;
  const StripKernels& kernels_;
  const int rows_, hidden_, width_;
  int places_ = 0;  // columns of an operand, which has every value twice: for B's high and low parts
  std::vector<Job> jobs_;
  std::vector<std::atomic<int>> left_;  // tasks, by expert
  std::vector<const void*> x_, h_;      // of each row, prepared
  char *tokens_ = nullptr, *hidden_rows_ = nullptr, *operands_ = nullptr, *placed_ = nullptr;
};

}  // namespace ktft
