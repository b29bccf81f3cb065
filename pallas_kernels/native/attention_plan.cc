#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace pagedjax {
namespace {

// Queries of an item: enough that a chunk computes more than it reads, few enough to stay in the nearest caches.
constexpr int32_t kItemQueries = 96;
// Reading a piece costs as much as multiplying this many queries with it.
constexpr int64_t kReadCost = 8;
// An item may cost a thread's share divided by this.
constexpr int64_t kItemsPerThread = 4;

// Consecutive tokens of one row.
struct Tile {
  int32_t row, first_token, num_tokens, num_pieces;
};

// States that `count` items or pieces have left, one every `stride` floats.
struct Before {
  int64_t at = 0;
  int32_t count = 0;
  int64_t stride = 0;
};

class Planner {
 public:
  Planner(const AttentionCall& call, const Rows& rows, int32_t num_threads)
      : call_(call), rows_(rows), num_threads_(num_threads),
        piece_tokens_(call.cache.piece_blocks * call.cache.block_size),
        state_size_(call.cache.v_dim + kStateExtra),
        tile_tokens_(std::max(1, kItemQueries / call.group)) {}

  AttentionPlan plan() {
    find_tiles();
    // Tokens in order for the tiles, then room for those of shared contexts: items point into this.
    plan_.tokens.reserve(call_.num_tokens + rows_.num_rows);
    for (int32_t token = 0; token < call_.num_tokens; ++token) plan_.tokens.push_back(token);
    shared_.assign(tiles_.size(), {});
    shared_pieces_.assign(tiles_.size(), 0);
    share_contexts();
    for (size_t i = 0; i < tiles_.size(); ++i)
      for (int32_t head = 0; head < call_.cache.num_kv_heads; ++head) add_tile(i, head);
    sort(plan_.first);
    sort(plan_.second);
    return std::move(plan_);
  }

 private:
  int64_t cost(int32_t num_tokens, int32_t num_pieces) const {
    return num_pieces * (kReadCost + static_cast<int64_t>(num_tokens) * call_.group);
  }
  bool is_dear(int64_t cost) const { return num_threads_ > 1 && cost > dear_; }
  const int32_t* table(int32_t row) const {
    return rows_.block_tables + static_cast<int64_t>(row) * rows_.table_width;
  }

  void find_tiles() {
    int64_t total = 0;
    for (int32_t row = 0; row < rows_.num_rows; ++row)
      for (int32_t token = rows_.q_starts[row], end = rows_.q_starts[row + 1]; token < end; token += tile_tokens_) {
        int32_t count = std::min(tile_tokens_, end - token);
        int32_t pieces = (call_.seen[token + count - 1] + piece_tokens_ - 1) / piece_tokens_;
        tiles_.push_back({row, token, count, pieces});
        total += cost(count, pieces) * call_.cache.num_kv_heads;
      }
    dear_ = total / (num_threads_ * kItemsPerThread);
  }

  // Whole blocks at the start that two rows have in common, as pieces; the piece of the last token is never shared.
  int32_t common_pieces(const Tile& a, const Tile& b) const {
    int32_t most = (std::min(a.num_pieces, b.num_pieces) - 1) * call_.cache.piece_blocks;
    const int32_t *x = table(a.row), *y = table(b.row);
    return static_cast<int32_t>(std::mismatch(x, x + most, y).first - x) / call_.cache.piece_blocks;
  }

  void share_contexts() {
    const size_t key_bytes = call_.cache.piece_blocks * sizeof(int32_t);
    std::vector<int32_t> alike;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const Tile& tile = tiles_[i];
      bool is_decode = rows_.q_starts[tile.row + 1] - rows_.q_starts[tile.row] == 1;
      if (is_decode && tile.num_pieces > 1 && !is_dear(cost(1, tile.num_pieces))) alike.push_back(i);
    }
    const auto compare = [&](int32_t a, int32_t b) {
      return std::memcmp(table(tiles_[a].row), table(tiles_[b].row), key_bytes);
    };
    std::stable_sort(alike.begin(), alike.end(), [&](int32_t a, int32_t b) { return compare(a, b) < 0; });
    for (size_t begin = 0, end; begin < alike.size(); begin = end) {
      for (end = begin + 1; end < alike.size() && compare(alike[begin], alike[end]) == 0; ++end) {
      }
      if (end - begin > 1) share(alike.data() + begin, end - begin);
    }
  }

  // `count` decode tiles that have at least their first piece in common.
  void share(const int32_t* members, int32_t count) {
    const Tile& first = tiles_[members[0]];
    int32_t pieces = first.num_pieces;
    for (int32_t i = 1; i < count; ++i) pieces = std::min(pieces, common_pieces(first, tiles_[members[i]]));
    for (int32_t begin = 0; begin < count; begin += tile_tokens_) {
      int32_t size = std::min(tile_tokens_, count - begin);
      const int32_t* tokens = plan_.tokens.data() + plan_.tokens.size();
      for (int32_t i = 0; i < size; ++i) plan_.tokens.push_back(tiles_[members[begin + i]].first_token);
      for (int32_t head = 0; head < call_.cache.num_kv_heads; ++head) {
        Before before = leave_states(tokens, size, head, table(first.row), pieces);
        for (int32_t i = 0; i < size; ++i) {
          int32_t member = members[begin + i];
          shared_pieces_[member] = pieces;
          shared_[member].push_back({before.at + i * call_.group * state_size_, before.count, before.stride});
        }
      }
    }
  }

  // Items of the first phase that leave states of the first `pieces` pieces: one item, or several if it were dear.
  Before leave_states(const int32_t* tokens, int32_t num_tokens, int32_t head, const int32_t* table, int32_t pieces) {
    int64_t states = static_cast<int64_t>(num_tokens) * call_.group * state_size_;
    AttentionItem item{tokens, num_tokens, head, table, 0, pieces, 0, 0, 0, plan_.num_state_floats, false, states};
    int64_t whole = cost(num_tokens, pieces);
    if (!is_dear(whole)) {
      plan_.num_state_floats += states;
      add(plan_.first, item);
      return {item.after, 1, 0};
    }
    int32_t parts = static_cast<int32_t>(std::min<int64_t>(pieces, (whole + dear_ - 1) / dear_));
    item.each_piece = true;
    plan_.num_state_floats += states * pieces;
    for (int32_t part = 0; part < parts; ++part) {
      item.first_piece = static_cast<int64_t>(pieces) * part / parts;
      item.end_piece = static_cast<int64_t>(pieces) * (part + 1) / parts;
      add(plan_.first, item);
    }
    return {item.after, pieces, states};
  }

  void add_tile(size_t index, int32_t head) {
    const Tile& tile = tiles_[index];
    const int32_t* tokens = plan_.tokens.data() + tile.first_token;
    Before before;
    int32_t first_piece = shared_pieces_[index];
    if (first_piece > 0) {
      before = shared_[index][head];
    } else if (tile.num_pieces > 1 && is_dear(cost(tile.num_tokens, tile.num_pieces))) {
      before = leave_states(tokens, tile.num_tokens, head, table(tile.row), tile.num_pieces);
      first_piece = tile.num_pieces;
    }
    AttentionItem item{tokens, tile.num_tokens, head, table(tile.row), first_piece, tile.num_pieces,
                       before.at, before.count, before.stride, kNoStates, false, 0};
    add(before.count ? plan_.second : plan_.first, item);
  }

  void add(std::vector<AttentionItem>& items, const AttentionItem& item) {
    items.push_back(item);
    plan_.max_queries = std::max(plan_.max_queries, item.num_tokens * call_.group);
  }

  void sort(std::vector<AttentionItem>& items) const {
    const auto cost_of = [&](const AttentionItem& item) {
      return cost(item.num_tokens, item.end_piece - item.first_piece);
    };
    std::stable_sort(items.begin(), items.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost_of(a) > cost_of(b); });
  }

  const AttentionCall& call_;
  const Rows& rows_;
  const int32_t num_threads_, piece_tokens_, state_size_, tile_tokens_;
  int64_t dear_ = 0;
  std::vector<Tile> tiles_;
  std::vector<std::vector<Before>> shared_;  // by tile, then by KV head
  std::vector<int32_t> shared_pieces_;       // by tile
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const AttentionCall& call, const Rows& rows, int32_t num_threads) {
  return Planner(call, rows, num_threads).plan();
}

}  // namespace pagedjax
