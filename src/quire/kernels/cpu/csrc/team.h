// The team of threads that runs a list of operations together. Every operation is called by all threads of the team at
// once and divides its work by thread index or by taking numbers from `next()`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace quire {

// This header is compiled with the flags of every instruction set, and the linker keeps one copy of an inline function, perhaps
// that of a set this machine lacks: so everything here is inlined by force, or lives in pool.cpp.
#define QUIRE_LOCAL inline __attribute__((always_inline))

// Order `values` so that the `wanted` largest come first, in any order.
void put_largest_first(float* values, int64_t count, int64_t wanted);
void sort_descending(float* values, int64_t count);

class Scratch {
   public:
    ~Scratch();
    void* get(size_t bytes);  // grows, never shrinks; growing loses the contents
    QUIRE_LOCAL size_t size() const { return size_; }

   private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

class Barrier {
   public:
    void wait(int threads);
    QUIRE_LOCAL std::atomic<int64_t>& ticket() { return ticket_; }

   private:
    friend class Pool;
    // Looks for a while, then yields between looks, then sleeps.
    void sleep_until_changed(uint32_t seen, int64_t nanoseconds);
    void advance();
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    std::atomic<int32_t> sleepers_{0};
    alignas(64) std::atomic<int64_t> ticket_{0};
};

struct Team {
    int index;
    int size;
    Barrier* barrier_object;
    Scratch* own_scratch;
    Scratch* common_scratch;

    // All threads wait for one another; afterwards `next()` counts from 0 again.
    QUIRE_LOCAL void barrier() {
        if (size > 1)
            barrier_object->wait(size);
        else
            barrier_object->ticket().store(0, std::memory_order_relaxed);
    }
    // The next piece of work that nobody has taken since the last barrier.
    QUIRE_LOCAL int64_t next() {
        if (size == 1) {
            auto& ticket = barrier_object->ticket();
            int64_t taken = ticket.load(std::memory_order_relaxed);
            ticket.store(taken + 1, std::memory_order_relaxed);
            return taken;
        }
        return barrier_object->ticket().fetch_add(1, std::memory_order_relaxed);
    }
    // This thread's memory; contents are lost at the next call.
    template <class T>
    QUIRE_LOCAL T* own(size_t bytes) {
        return static_cast<T*>(own_scratch->get(bytes));
    }
    // Memory that the team shares; called by all threads alike, with the same size.
    template <class T>
    QUIRE_LOCAL T* common(size_t bytes) {
        if (bytes > common_scratch->size()) {
            barrier();
            if (index == 0) common_scratch->get(bytes);
            barrier();
        }
        return static_cast<T*>(common_scratch->get(0));
    }
    // This thread's share [begin, end) of `count` equal pieces.
    QUIRE_LOCAL void share(int64_t count, int64_t& begin, int64_t& end) const {
        begin = count * index / size;
        end = count * (index + 1) / size;
    }
};

using Operation = void (*)(const void* arguments, int64_t rows, Team& team);

struct NamedOperation {
    const char* name;
    Operation function;
};

// What one instruction set's translation unit offers; ends with a null name.
struct KernelSet {
    const char* isa;
    const NamedOperation* operations;
};

}  // namespace quire
