// The thread pool, recorded programs, the choice of the instruction set, and the C interface. Knows no operation by name.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arguments.h"
#include "team.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

void put_largest_first(float* values, int64_t count, int64_t wanted) {
    std::nth_element(values, values + wanted - 1, values + count, std::greater<float>());
}

void sort_descending(float* values, int64_t count) { std::sort(values, values + count, std::greater<float>()); }

#if defined(QUIRE_HAVE_GENERIC)
extern const KernelSet kernels_generic;
#endif
#if defined(QUIRE_HAVE_AVX2)
extern const KernelSet kernels_avx2;
#endif
#if defined(QUIRE_HAVE_AVX512)
extern const KernelSet kernels_avx512;
#endif
#if defined(QUIRE_HAVE_AVX512_VNNI)
extern const KernelSet kernels_avx512_vnni;
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
extern const KernelSet kernels_avx512_bf16;
#endif
#if defined(QUIRE_HAVE_NEON)
extern const KernelSet kernels_neon;
#endif

namespace {

int64_t now_nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
void sleep_while_equal(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;
void sleep_while_equal(std::atomic<uint32_t>& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleep_condition.wait(lock, [&] { return word.load() != value; });
}
void wake_all(std::atomic<uint32_t>&) {
    std::lock_guard<std::mutex> lock(sleep_mutex);
    sleep_condition.notify_all();
}
#endif

}  // namespace

// A waiting thread looks this long; then it yields between looks, since the one it waits for may want this very core. (With
// one busy process beside two threads on two cores, a step took twice as long when this was 50 µs, and 4 ms for every operation
// without yielding.) At last it sleeps: between steps after `spin_nanoseconds`, within a step after the second constant.
constexpr int64_t LOOK_NANOSECONDS = 5'000;
constexpr int64_t IN_STEP_NANOSECONDS = 200'000;

Scratch::~Scratch() { std::free(data_); }

void* Scratch::get(size_t bytes) {
    if (bytes > size_) {
        std::free(data_);
        size_ = (bytes + 4095) / 4096 * 4096;
        data_ = std::aligned_alloc(4096, size_);
        if (!data_) std::abort();
    }
    return data_;
}

void Barrier::advance() {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(generation_);
}

void Barrier::sleep_until_changed(uint32_t seen, int64_t nanoseconds) {
    // Short waits are the rule: look often before asking for the time.
    for (int look = 0; look < 60; ++look) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        pause_briefly();
    }
    const int64_t begin = now_nanoseconds();
    for (int64_t now = begin; now < begin + nanoseconds; now = now_nanoseconds()) {
        if (now >= begin + LOOK_NANOSECONDS) std::this_thread::yield();
        for (int look = 0; look < 10; ++look) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            pause_briefly();
        }
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == seen) sleep_while_equal(generation_, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Barrier::wait(int threads) {
    uint32_t seen = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        ticket_.store(0, std::memory_order_relaxed);
        advance();
    } else {
        sleep_until_changed(seen, IN_STEP_NANOSECONDS);
    }
}

struct Step {
    Operation operation;
    int32_t row_kind;  // 0: always `rows`; 1: the step's tokens; 2: the step's logits
    int64_t rows;
    std::unique_ptr<char[]> arguments;
};

struct Program {
    std::vector<Step> steps;
};

struct Job {
    const Step* steps;
    size_t count;
    int64_t num_tokens, num_logits;
};

class Pool {
   public:
    explicit Pool(int threads) : scratch_(threads) {
        for (int index = 1; index < threads; ++index) threads_.emplace_back([this, index] { work(index); });
    }

    ~Pool() {
        stopping_ = true;
        start_.advance();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return static_cast<int>(scratch_.size()); }

    void run(const Job& job) {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = job;
        barrier_.ticket_.store(0, std::memory_order_relaxed);
        if (size() > 1) start_.advance();
        walk(0);
    }

    std::atomic<int64_t> spin_nanoseconds{50000};

   private:
    void work(int index) {
        uint32_t seen = 0;
        for (;;) {
            start_.sleep_until_changed(seen, spin_nanoseconds);
            if (stopping_) return;
            ++seen;
            walk(index);
        }
    }

    void walk(int index) {
        Team team{index, size(), &barrier_, &scratch_[index], &common_};
        const Job job = job_;
        bool met = false;
        for (size_t i = 0; i < job.count; ++i) {
            const Step& step = job.steps[i];
            int64_t rows = step.row_kind == 0 ? step.rows : step.row_kind == 1 ? job.num_tokens : job.num_logits;
            if (rows <= 0) continue;
            step.operation(step.arguments.get(), rows, team);
            team.barrier();
            met = true;
        }
        // A walk without a barrier would let the caller change the job under a thread that has not read it yet.
        if (!met) team.barrier();
    }

    std::mutex mutex_;
    Barrier start_, barrier_;
    Job job_{};
    std::atomic<bool> stopping_{false};
    std::vector<Scratch> scratch_;
    Scratch common_;
    std::vector<std::thread> threads_;
};

namespace {

struct State {
    std::mutex mutex;
    Pool* pool = nullptr;
    int threads = 0;
    int64_t spin_nanoseconds = 50000;
    const KernelSet* kernels = nullptr;
};

// Never destroyed: threads may outlive static destructors at exit.
State& state() {
    static State* instance = new State;
    return *instance;
}

// Threads do not survive a fork: the child forgets the pool (leaking it) and makes its own at the first call.
void forget_pool() { state().pool = nullptr; }

Pool& pool() {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.pool) {
        static bool registered = pthread_atfork(nullptr, nullptr, forget_pool) == 0;
        (void)registered;
        int threads = s.threads > 0 ? s.threads : static_cast<int>(std::thread::hardware_concurrency());
        s.pool = new Pool(threads > 0 ? threads : 1);
        s.pool->spin_nanoseconds = s.spin_nanoseconds;
    }
    return *s.pool;
}

// Sets that this machine can run, best first.
std::vector<const KernelSet*> usable_sets() {
    std::vector<const KernelSet*> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(QUIRE_HAVE_AVX512_BF16) || defined(QUIRE_HAVE_AVX512_VNNI) || defined(QUIRE_HAVE_AVX512)
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
    // Intel's vdpbf16ps has a fraction of the rate of its float32 products: 197 against 319 GFLOP/s (two cores, 4096 x 4096,
    // 2,048 rows) on a Sapphire Rapids Xeon, bench/results/cpu-kernels-sapphire-rapids.json.
    const bool is_intel = __builtin_cpu_is("intel");
    const bool has_pairs = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (has_pairs && !is_intel) sets.push_back(&kernels_avx512_bf16);
#endif
#if defined(QUIRE_HAVE_AVX512_VNNI)
    if (avx512 && __builtin_cpu_supports("avx512vnni")) sets.push_back(&kernels_avx512_vnni);
#endif
#if defined(QUIRE_HAVE_AVX512)
    if (avx512) sets.push_back(&kernels_avx512);
#endif
#if defined(QUIRE_HAVE_AVX512_BF16)
    if (has_pairs && is_intel) sets.push_back(&kernels_avx512_bf16);
#endif
#if defined(QUIRE_HAVE_AVX2)
    // F16C is in every processor with AVX2 (Haswell, Excavator and later).
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&kernels_avx2);
#endif
#endif
#if defined(QUIRE_HAVE_NEON)
    sets.push_back(&kernels_neon);
#endif
#if defined(QUIRE_HAVE_GENERIC)
    sets.push_back(&kernels_generic);
#endif
    return sets;
}

}  // namespace
}  // namespace quire

using namespace quire;

// What this library was made from, as the build names it.
QUIRE_API const char* quire_cpu_sources() { return QUIRE_SOURCES; }

// Names of the usable instruction sets, best first, separated by commas.
QUIRE_API const char* quire_cpu_isas() {
    static std::string names = [] {
        std::string joined;
        for (auto* set : usable_sets()) joined += (joined.empty() ? "" : ",") + std::string(set->isa);
        return joined;
    }();
    return names.c_str();
}

// Choose an instruction set (null or "": the best). Returns its name, or null if this machine cannot run it.
QUIRE_API const char* quire_cpu_select(const char* isa) {
    for (auto* set : usable_sets()) {
        if (!isa || !*isa || !std::strcmp(isa, set->isa)) {
            state().kernels = set;
            return set->isa;
        }
    }
    return nullptr;
}

// The chosen set's operation of that name, or null.
QUIRE_API void* quire_cpu_operation(const char* name) {
    if (!state().kernels && !quire_cpu_select(nullptr)) return nullptr;
    for (auto* entry = state().kernels->operations; entry->name; ++entry)
        if (!std::strcmp(entry->name, name)) return reinterpret_cast<void*>(entry->function);
    return nullptr;
}

QUIRE_API void quire_cpu_set_threads(int threads) {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (s.pool && s.pool->size() != threads) {
        delete s.pool;
        s.pool = nullptr;
    }
    s.threads = threads;
}

QUIRE_API int quire_cpu_threads() { return pool().size(); }

// How long a thread waits for the next step before it sleeps.
QUIRE_API void quire_cpu_set_spin(int64_t nanoseconds) {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    s.spin_nanoseconds = nanoseconds;
    if (s.pool) s.pool->spin_nanoseconds = nanoseconds;
}

// Ask for huge pages behind a range that nothing has touched yet: fewer address look-ups while weights stream.
QUIRE_API void quire_cpu_use_huge_pages(void* address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

QUIRE_API void quire_cpu_run(void* operation, const void* arguments, int64_t rows) {
    Step step{reinterpret_cast<Operation>(operation), 0, rows, nullptr};
    step.arguments.reset(const_cast<char*>(static_cast<const char*>(arguments)));
    pool().run(Job{&step, 1, 0, 0});
    step.arguments.release();
}

QUIRE_API void* quire_cpu_program_new() { return new Program; }

QUIRE_API void quire_cpu_program_add(void* program, void* operation, const void* arguments, int64_t bytes, int row_kind,
                                     int64_t rows) {
    std::unique_ptr<char[]> copy(new char[bytes]);
    std::memcpy(copy.get(), arguments, bytes);
    static_cast<Program*>(program)->steps.push_back(
        Step{reinterpret_cast<Operation>(operation), row_kind, rows, std::move(copy)});
}

QUIRE_API void quire_cpu_program_run(void* program, int64_t num_tokens, int64_t num_logits) {
    auto& steps = static_cast<Program*>(program)->steps;
    pool().run(Job{steps.data(), steps.size(), num_tokens, num_logits});
}

QUIRE_API void quire_cpu_program_free(void* program) { delete static_cast<Program*>(program); }
