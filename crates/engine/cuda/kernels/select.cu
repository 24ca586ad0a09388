// The order of weights without sorting: where a running sum over descending weights, lowest id first among equals, reaches a goal.
// Sums are integers, so that they do not depend on the order in which threads add.

#define SAMPLERS 1024
#define BUCKETS 256

// Weights are at most 1.
DEVICE u64 fixed(float weight) { return static_cast<u64>(weight * 1099511627776.0f); }

struct SelectShared {
    u64 sums[BUCKETS];
    u32 counts[BUCKETS];
    u64 scratch[32];
    u64 above_sum;
    u32 above_count, bucket, token;
};

struct Selected {
    // Bits of the weight at which the goal is reached; weights above it are before it.
    u32 weight_bits;
    u64 above_sum;
    u32 above_count;
    // Which of the tokens of this very weight reaches the goal, from 1 on.
    u64 nth;

    DEVICE u64 sum() const { return above_sum + nth * fixed(from_bits(weight_bits)); }
};

// Whether a bucket's place in descending order reaches the goal; the sums above it are given.
template <bool COUNTS>
DEVICE void find_bucket(SelectShared* shared, u64 goal) {
    // Lane 0 has the highest eight buckets.
    const int lane = lane_of(), highest = BUCKETS - 1 - lane * 8;
    u64 above = COUNTS ? shared->above_count : shared->above_sum;
    // Everybody has read before the lane that finds the bucket writes.
    sync_warp();
    u64 own = 0;
    for (int b = 0; b < 8; b++) own += COUNTS ? shared->counts[highest - b] : shared->sums[highest - b];
    u64 before = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = from_lane(before, lane >= distance ? lane - distance : 0);
        if (lane >= distance) before += other;
    }
    before -= own;
    if (above + before >= goal || above + before + own < goal) return;
    u64 other_sum = 0;
    u32 other_count = 0;
    for (int b = BUCKETS - 1; b > highest; b--) {
        other_sum += shared->sums[b];
        other_count += shared->counts[b];
    }
    above += before;
    for (int b = highest; b > highest - 8; b--) {
        const u64 here = COUNTS ? shared->counts[b] : shared->sums[b];
        if (above + here >= goal) {
            shared->bucket = b;
            shared->above_sum += other_sum;
            shared->above_count += other_count;
            return;
        }
        above += here;
        other_sum += shared->sums[b];
        other_count += shared->counts[b];
    }
}

// `goal` is at least 1 and at most the sum (or number, if COUNTS) of the weights from `least` up. Smaller ones are passed over, since what many threads
// add to few buckets is what takes time here.
template <bool COUNTS>
DEVICE Selected select(SelectShared* shared, const float* weights, i32 vocab, u64 goal, float least) {
    u32 prefix = 0;
    if (threadIdx.x == 0) {
        shared->above_sum = 0;
        shared->above_count = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        // What was read of the pass before is behind everybody.
        sync_block();
        if (threadIdx.x < BUCKETS) {
            shared->sums[threadIdx.x] = 0;
            shared->counts[threadIdx.x] = 0;
        }
        sync_block();
        for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) {
            const u32 bits = bits_of(weights[i]);
            if (weights[i] < least) continue;
            if (shift < 24 && bits >> (shift + 8) != prefix) continue;
            const u32 bucket = bits >> shift & (BUCKETS - 1);
            add_shared(&shared->sums[bucket], fixed(weights[i]));
            add_shared(&shared->counts[bucket], 1u);
        }
        sync_block();
        if (warp_of() == 0) find_bucket<COUNTS>(shared, goal);
        sync_block();
        prefix = prefix << 8 | shared->bucket;
    }
    const u64 above_sum = shared->above_sum;
    const u32 above_count = shared->above_count;
    const u64 one = fixed(from_bits(prefix));
    const u64 nth = COUNTS ? goal - above_count : (goal - above_sum + one - 1) / one;
    sync_block();
    return Selected{prefix, above_sum, above_count, nth};
}

// A weight that at least 1024 tokens reach (all of them, if there are fewer): each thread's largest one reaches the least of these.
DEVICE float reached_by_many(SelectShared* shared, const float* weights, i32 vocab) {
    float largest = 0;
    for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) largest = fmaxf(largest, weights[i]);
    for (int mask = 16; mask > 0; mask /= 2) largest = fminf(largest, exchange(largest, mask));
    float* scratch = reinterpret_cast<float*>(shared->scratch);
    if (lane_of() == 0) scratch[warp_of()] = largest;
    sync_block();
    for (int warp = 0; warp < SAMPLERS / 32; warp++) largest = fminf(largest, scratch[warp]);
    sync_block();
    return largest;
}

// Sums of `own` over all threads before this one, in order of threads; `total` is everybody's.
DEVICE u64 sum_before(SelectShared* shared, u64 own) {
    const int lane = lane_of();
    u64 running = own;
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = from_lane(running, lane >= distance ? lane - distance : 0);
        if (lane >= distance) running += other;
    }
    if (lane == 31) shared->scratch[warp_of()] = running;
    sync_block();
    u64 before = running - own;
    for (int warp = 0; warp < warp_of(); warp++) before += shared->scratch[warp];
    sync_block();
    return before;
}

// The token, in ascending order of ids, at which the running sum of `value` reaches the goal.
template <class Value>
DEVICE u32 find_in_order(SelectShared* shared, i32 vocab, u64 goal, const Value& value) {
    const i32 share = (vocab + SAMPLERS - 1) / SAMPLERS;
    const i32 start = min(static_cast<i32>(threadIdx.x) * share, vocab), end = min(start + share, vocab);
    u64 own = 0;
    for (i32 i = start; i < end; i++) own += value(i);
    u64 running = sum_before(shared, own);
    if (running < goal && running + own >= goal) {
        for (i32 i = start; i < end; i++) {
            running += value(i);
            if (running >= goal) {
                shared->token = i;
                break;
            }
        }
    }
    sync_block();
    const u32 token = shared->token;
    sync_block();
    return token;
}
