// From logits to a token, by the rules of src/sampler.rs.

struct Sampling {
    u64 seed;
    u32 sequence, position;
    float temperature, top_p, min_p;
    u32 top_k, row, unused;
};

// SplitMix64's finaliser (Steele, Lea, Flood, 2014).
DEVICE u64 finalise(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The random number of a token, in [0, 1).
DEVICE double uniform(const Sampling& s) {
    const u64 increment = 0x9e3779b97f4a7c15ull;
    const u64 key = finalise(s.seed + increment), counter = static_cast<u64>(s.sequence) << 32 | s.position;
    return static_cast<double>(finalise(finalise(key ^ counter) + increment) >> 11) * (1.0 / 9007199254740992.0);
}

// Orders floats as integers; both zeros are one.
DEVICE u32 ordered(float x) {
    const u32 bits = x == 0.0f ? 0u : bits_of(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Largest {
    float logit;
    u32 token;
    bool finite;
};

// The largest logit and the lowest token that has it.
DEVICE Largest find_largest(u64* scratch, const float* logits, i32 vocab) {
    u64 best = 0;
    for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) {
        // An infinity or a NaN wins over every number.
        const bool finite = (bits_of(logits[i]) & 0x7f800000u) != 0x7f800000u;
        const u64 key = finite ? static_cast<u64>(ordered(logits[i])) << 32 | ~static_cast<u32>(i) : ~u64{0};
        best = key > best ? key : best;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        const u64 other = exchange(best, mask);
        best = other > best ? other : best;
    }
    if (lane_of() == 0) scratch[warp_of()] = best;
    sync_block();
    for (int warp = 0; warp < SAMPLERS / 32; warp++) best = scratch[warp] > best ? scratch[warp] : best;
    sync_block();
    const u32 token = ~static_cast<u32>(best);
    return best == ~u64{0} ? Largest{0, 0, false} : Largest{logits[token], token, true};
}

// Sum of what `min_p` leaves.
DEVICE u64 sum_from(SelectShared* shared, const float* weights, i32 vocab, float least) {
    u64 own = 0;
    for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) own += weights[i] >= least ? fixed(weights[i]) : 0;
    const u64 total = block_sum(own, shared->scratch);
    sync_block();
    return total;
}

// The goal of a running sum that a random number stands for.
DEVICE u64 goal_of(double share, u64 total) {
    const u64 goal = static_cast<u64>(share * static_cast<double>(total)) + 1;
    return goal < total ? goal : total;
}

DEVICE u32 choose(SelectShared* shared, const float* weights, i32 vocab, const Sampling& s) {
    if (s.top_k == 0 && s.top_p >= 1.0f) {
        const u64 total = sum_from(shared, weights, vocab, s.min_p);
        return find_in_order(shared, vocab, goal_of(uniform(s), total), [&](i32 i) { return weights[i] >= s.min_p ? fixed(weights[i]) : 0; });
    }
    u64 kept;
    // What is kept weighs at least this.
    float least = 0;
    if (s.top_k > 0 && s.top_k < static_cast<u32>(vocab)) {
        least = s.top_k <= SAMPLERS ? reached_by_many(shared, weights, vocab) : 0.0f;
        const Selected last = select<true>(shared, weights, vocab, s.top_k, least);
        kept = last.sum();
        least = from_bits(last.weight_bits);
    } else {
        kept = sum_from(shared, weights, vocab, 0.0f);
        // Tokens below this have less than half of 1 - top_p together.
        least = (1.0f - s.top_p) * (static_cast<float>(kept) / 1099511627776.0f) / static_cast<float>(2 * vocab);
    }
    if (s.top_p < 1.0f) {
        const double wanted = static_cast<double>(s.top_p) * static_cast<double>(kept);
        u64 goal = static_cast<u64>(wanted);
        goal += static_cast<double>(goal) < wanted ? 1 : 0;
        goal = goal < 1 ? 1 : goal > kept ? kept : goal;
        const Selected last = select<false>(shared, weights, vocab, goal, least);
        kept = last.sum();
        least = from_bits(last.weight_bits);
    }
    // Weights of those kept are at least the last one's; below `min_p` they are a tail of the order.
    if (least < s.min_p) {
        least = s.min_p;
        kept = sum_from(shared, weights, vocab, least);
    }
    const Selected drawn = select<false>(shared, weights, vocab, goal_of(uniform(s), kept), least);
    return find_in_order(shared, vocab, drawn.nth, [&](i32 i) { return static_cast<u64>(bits_of(weights[i]) == drawn.weight_bits); });
}

DEVICE void draw(u32* tokens, float* logprobs, float* all_weights, const float* all_logits, const Sampling* samplings, i32 vocab,
                 i32 logits_stride) {
    REQUIRE(blockDim.x == SAMPLERS);
    SHARED(bytes);
    SelectShared* shared = reinterpret_cast<SelectShared*>(bytes);
    const Sampling s = samplings[blockIdx.x];
    const float* logits = all_logits + static_cast<u64>(s.row) * logits_stride;
    const Largest largest = find_largest(shared->scratch, logits, vocab);
    if (!largest.finite) {
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = 0xffffffffu;
            logprobs[blockIdx.x] = 0;
        }
        return;
    }
    float own = 0;
    for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) own += expf(logits[i] - largest.logit);
    const float normaliser = logf(block_sum(own, reinterpret_cast<float*>(shared->scratch)));
    sync_block();
    u32 token = largest.token;
    if (s.temperature >= 1e-5f) {
        float* weights = all_weights + static_cast<u64>(blockIdx.x) * vocab;
        const float scale = 1.0f / s.temperature;
        for (i32 i = threadIdx.x; i < vocab; i += SAMPLERS) weights[i] = expf((logits[i] - largest.logit) * scale);
        sync_block();
        token = choose(shared, weights, vocab, s);
    }
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = token;
        logprobs[blockIdx.x] = logits[token] - largest.logit - normaliser;
    }
}
