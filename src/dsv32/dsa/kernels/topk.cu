// Top-k of index scores, one block per row: ascending columns, equal scores to the smaller column.
//
// The k-th largest score is found by a search over order-preserving integers that stay in registers; a count
// costs one barrier. A row longer than one tile is read once: a sample of it gives a bound that the k-th score
// is almost surely above, the scores above the bound are packed in order into shared memory, and the search
// runs on those. Where the sample misled (fewer than k above the bound, or more than fit), the row is bisected
// as it lies, which is slow and gives the same answer.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int PER = 32;                // scores of a thread
constexpr int TILE = THREADS * PER;    // scores in registers at once
constexpr int CAP = 4096;              // scores in shared memory
constexpr int FEW = CAP / THREADS;
constexpr int LOWEST = -2147483647 - 1;
constexpr unsigned ALL = 0xffffffffu;

struct Shared {
    int keys[CAP];
    int columns[CAP];
    int counts[2][2][WARPS];
};

// Signed integers in the order of the floats, a NaN at either end; never LOWEST. Its own inverse but for -0.0,
// which equals 0.0.
__device__ int ordered(float x) {
    int b = __float_as_int(x == 0.0f ? 0.0f : x);
    return max(b ^ ((b >> 31) & 0x7fffffff), LOWEST + 1);
}

__device__ float score_of(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

struct Row {
    Shared& shared;
    int lane, warp, phase;

    __device__ Row(Shared& s) : shared(s), lane(threadIdx.x % 32), warp(threadIdx.x / 32), phase(0) {}

    // Each thread brings a number; before: the sum of the earlier warps'; returns the sum of all. Two buffers in
    // turn, so that one barrier is enough.
    __device__ int sums(int mine, int& before, int slot = 0, bool barrier = true) {
        int total = __reduce_add_sync(ALL, mine);
        if (lane == 0) shared.counts[phase][slot][warp] = total;
        if (!barrier) return 0;
        __syncthreads();
        return collect(before, slot);
    }

    __device__ int collect(int& before, int slot) {
        int x = lane < WARPS ? shared.counts[phase][slot][lane] : 0;
        before = __reduce_add_sync(ALL, lane < warp ? x : 0);
        return __reduce_add_sync(ALL, x);
    }

    __device__ int sum(int mine) {
        int before, total = sums(mine, before);
        phase ^= 1;
        return total;
    }

    __device__ void highest(int& a, int& b) {
        a = __reduce_max_sync(ALL, a);
        b = __reduce_max_sync(ALL, b);
        if (lane == 0) {
            shared.counts[phase][0][warp] = a;
            shared.counts[phase][1][warp] = b;
        }
        __syncthreads();
        a = __reduce_max_sync(ALL, shared.counts[phase][0][lane % WARPS]);
        b = __reduce_max_sync(ALL, shared.counts[phase][1][lane % WARPS]);
        phase ^= 1;
    }

    template <int N>
    __device__ int at_least(const int (&key)[N], int threshold) {
        int mine = 0;
#pragma unroll
        for (int i = 0; i < N; i++) mine += key[i] >= threshold;
        return sum(mine);
    }

    template <int N>
    __device__ int above(const int (&key)[N], int threshold) {
        int mine = 0;
#pragma unroll
        for (int i = 0; i < N; i++) mine += key[i] > threshold;
        return sum(mine);
    }

    // A threshold that at least count of the `valid` keys reach, and no larger one does: exact where just count
    // reach it, else the count-th largest of several equal ones. A key of LOWEST does not count.
    template <int N>
    __device__ int kth(const int (&key)[N], int count, int valid, bool& exact) {
        int high = LOWEST, low = LOWEST;
#pragma unroll
        for (int i = 0; i < N; i++) {
            high = max(high, key[i]);
            low = max(low, key[i] == LOWEST ? LOWEST : -1 - key[i]);  // -1 - key reverses the order
        }
        highest(high, low);
        low = -1 - low;
        int found_low = valid, found_high = 0;
        exact = found_low == count;
        // The logarithm of the count is nearly linear in the score where scores have a tail: interpolating it
        // takes about eight steps. Every third step halves the scores between the ends, and after 24 steps the
        // integers, so that no input takes more than 56.
        for (int step = 0; low < high && !exact; step++) {
            float a = score_of(low), b = score_of(high), middle_score;
            unsigned gap = unsigned(high) - unsigned(low);
            int middle = int(unsigned(low) + gap / 2 + (gap & 1));
            if (step < 24) {
                if (step % 3 < 2) {
                    float top = __logf(found_low + 0.5f);
                    middle_score = a + (b - a) * __fdividef(top - __logf(float(count)), top - __logf(found_high + 0.5f));
                } else {
                    middle_score = 0.5f * a + 0.5f * b;
                }
                middle = max(low + 1, min(high, ordered(middle_score)));
            }
            int found = at_least(key, middle);
            if (found < count) {
                high = middle - 1;
                found_high = found;
            } else {
                low = middle;
                found_low = found;
                exact = found == count;
            }
        }
        return low;
    }

    // Write the columns whose keys reach the threshold, in order of warp, then i, then lane.
    template <int N, class Column>
    __device__ void emit_all(const int (&key)[N], Column column, int threshold, int* indices, float* picked) {
        int mine = 0, before;
#pragma unroll
        for (int i = 0; i < N; i++) mine += key[i] >= threshold;
        sums(mine, before);
        phase ^= 1;
        unsigned earlier = (1u << lane) - 1;
        indices += before;
        picked += before;
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool take = key[i] >= threshold;
            unsigned all = __ballot_sync(ALL, take);
            if (take) {
                int slot = __popc(all & earlier);
                indices[slot] = column(i);
                picked[slot] = score_of(key[i]);
            }
            indices += __popc(all);
            picked += __popc(all);
        }
    }

    // The same for a threshold that too many reach: all above it, and the first of those equal to it.
    template <int N, class Column>
    __device__ void choose(
        const int (&key)[N], Column column, int count, int valid, int* indices, float* picked) {
        bool exact;
        int threshold = kth(key, count, valid, exact);
        if (exact) {
            emit_all(key, column, threshold, indices, picked);
        } else {
            int ties = count - above(key, threshold);
            emit(key, column, threshold, ties, indices, picked);
        }
    }

    // Write the chosen of N columns a warp: all above threshold and the first `ties` equal to it. Returns how
    // many were written and lowers ties.
    template <int N, class Column>
    __device__ int emit(const int (&key)[N], Column column, int threshold, int& ties, int* indices, float* picked) {
        int above = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            above += key[i] > threshold;
            equal += key[i] == threshold && key[i] != LOWEST;
        }
        int above_before, equal_before;
        sums(above, above_before, 0, false);
        sums(equal, equal_before, 1, false);
        __syncthreads();
        int all_above = collect(above_before, 0), all_equal = collect(equal_before, 1);
        phase ^= 1;
        unsigned earlier = (1u << lane) - 1;
#pragma unroll
        for (int i = 0; i < N; i++) {
            unsigned a = __ballot_sync(ALL, key[i] > threshold);
            unsigned e = __ballot_sync(ALL, key[i] == threshold && key[i] != LOWEST);
            int rank = equal_before + __popc(e & earlier);
            bool take = (a >> lane & 1) || ((e >> lane & 1) && rank < ties);
            if (take) {
                int slot = above_before + __popc(a & earlier) + min(rank, ties);
                indices[slot] = column(i);
                picked[slot] = score_of(key[i]);
            }
            above_before += __popc(a);
            equal_before += __popc(e);
        }
        int written = min(all_equal, ties);
        ties -= written;
        return all_above + written;
    }
};

__device__ void load(const float* scores, int first, int length, int (&key)[PER]) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int c = first + i * 32;
        key[i] = c < length ? ordered(scores[c]) : LOWEST;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    topk(const float* scores, const int* starts, const int* ends, int* indices, float* picked, int count,
         long long stride, long long indices_stride, long long picked_stride) {
    __shared__ Shared shared;
    long long r = blockIdx.x;
    int start = starts[r], length = max(ends[r] - start, 0);
    scores += r * stride;
    indices += r * indices_stride;
    picked += r * picked_stride;
    if (length <= count) {
        for (int c = threadIdx.x; c < count; c += THREADS) {
            indices[c] = c < length ? c + start : -1;
            picked[c] = c < length ? scores[c] : -__int_as_float(0x7f800000);
        }
        return;
    }
    Row row(shared);
    int own = row.warp * (32 * PER) + row.lane;  // this thread's first column of a tile
    int key[PER];
    if (length <= TILE) {
        load(scores, own, length, key);
        row.choose(key, [&](int i) { return start + own + i * 32; }, count, length, indices, picked);
        return;
    }
    // Runs of 32 neighbours, evenly spread.
    int apart = length / TILE * 32;
#pragma unroll
    for (int i = 0; i < PER; i++) key[i] = ordered(scores[(row.warp * PER + i) * apart + row.lane]);
    float mean = float(count) * TILE / length;
    bool exact;
    int bound = row.kth(key, min(TILE, int(mean + 4.0f * sqrtf(mean) + 8.0f)), TILE, exact);
    int kept = 0;
    for (int tile = 0; tile < length; tile += TILE) {
        load(scores, tile + own, length, key);
        int mine = 0, before;
#pragma unroll
        for (int i = 0; i < PER; i++) mine += key[i] >= bound;
        int all = row.sums(mine, before);
        row.phase ^= 1;
        before += kept;
        kept += all;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            unsigned a = __ballot_sync(ALL, key[i] >= bound);
            int slot = before + __popc(a & ((1u << row.lane) - 1));
            if ((a >> row.lane & 1) && slot < CAP) {
                shared.keys[slot] = key[i];
                shared.columns[slot] = tile + own + i * 32;
            }
            before += __popc(a);
        }
    }
    __syncthreads();
    if (count <= kept && kept <= CAP) {
        int few[FEW];
        int mine = row.warp * (32 * FEW) + row.lane;
#pragma unroll
        for (int i = 0; i < FEW; i++) few[i] = mine + i * 32 < kept ? shared.keys[mine + i * 32] : LOWEST;
        row.choose(few, [&](int i) { return start + shared.columns[mine + i * 32]; }, count, kept, indices, picked);
        return;
    }
    int low = LOWEST, high = 2147483647;
    while (low < high) {
        unsigned gap = unsigned(high) - unsigned(low);
        int middle = int(unsigned(low) + gap / 2 + (gap & 1));
        int found = 0;
        for (int tile = 0; tile < length; tile += TILE) {
            load(scores, tile + own, length, key);
            found += row.at_least(key, middle);
        }
        if (found < count) high = middle - 1;
        else low = middle;
    }
    int ties = count;
    for (int tile = 0; tile < length; tile += TILE) {
        load(scores, tile + own, length, key);
        ties -= row.above(key, low);
    }
    for (int tile = 0; tile < length; tile += TILE) {
        load(scores, tile + own, length, key);
        int done = row.emit(key, [&](int i) { return start + tile + own + i * 32; }, low, ties, indices, picked);
        indices += done;
        picked += done;
    }
}
