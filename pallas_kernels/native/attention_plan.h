// From the rows of a call to items of about equal cost.
#pragma once

#include <vector>

#include "attention.h"

namespace pagedjax {

struct Rows {
  int32_t num_rows, table_width;
  const int32_t* block_tables;  // [rows, table_width]
  const int32_t* q_starts;      // [rows + 1]
  const int32_t* kv_lens;       // [rows]
};

struct AttentionPlan {
  // `second` reads states that `first` leaves. Each is sorted, the dearest first.
  std::vector<AttentionItem> first, second;
  std::vector<int32_t> tokens;  // what the items point into
  int64_t num_state_floats = 0;
  int32_t max_queries = 0;  // of an item
};

// Decode rows whose tables begin with the same pieces attend to these together. A row whose context costs more than its
// share of the threads is cut along the context. `rows` must have been checked.
AttentionPlan plan_attention(const AttentionCall& call, const Rows& rows, int32_t num_threads);

}  // namespace pagedjax
