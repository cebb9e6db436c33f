/* LD_PRELOAD: live and peak bytes of a process's tensors, and live bytes of its whole heap.
 *
 * torch's allocator for the CPU is who calls posix_memalign, so these blocks are the storages of tensors: of all threads, and
 * also those that only C++ holds. gloo's scratch memory comes from there, too. Their addresses are kept in a hash table with
 * linear probing; an entry that is removed is filled by those behind it, so the table stays as full as there are blocks.
 *
 * glibc exports its allocator under other names too, so nothing has to be looked up while memory is already needed. */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define SLOTS (1u << 18)
#define MASK (SLOTS - 1)

static struct { void *block; size_t size; } table[SLOTS];
static unsigned used;
static long long tensors, tensors_peak, heap;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned home(void *block) { return (unsigned)(((uintptr_t)block >> 6) * 0x9E3779B97F4A7C15ull >> 40) & MASK; }

static void add_to_heap(void *block, int sign) {
    if (block) __atomic_fetch_add(&heap, sign * (long long)malloc_usable_size(block), __ATOMIC_RELAXED);
}

static void remember(void *block, size_t size) {
    pthread_mutex_lock(&lock);
    if (used < SLOTS / 2) { /* more tensors than that are not counted, and never were there */
        unsigned i = home(block);
        while (table[i].block) i = (i + 1) & MASK;
        table[i].block = block;
        table[i].size = size;
        used++;
        tensors += (long long)size;
        if (tensors > tensors_peak) tensors_peak = tensors;
    }
    pthread_mutex_unlock(&lock);
}

static void forget(void *block) {
    pthread_mutex_lock(&lock);
    unsigned i = home(block);
    while (table[i].block && table[i].block != block) i = (i + 1) & MASK;
    if (table[i].block) {
        tensors -= (long long)table[i].size;
        used--;
        unsigned hole = i;
        for (unsigned j = (i + 1) & MASK; table[j].block; j = (j + 1) & MASK) {
            /* An entry moves into the hole if the hole is on its way from home. */
            if (((j - home(table[j].block)) & MASK) >= ((j - hole) & MASK)) {
                table[hole] = table[j];
                hole = j;
            }
        }
        table[hole].block = NULL;
    }
    pthread_mutex_unlock(&lock);
}

void *malloc(size_t size) {
    void *block = __libc_malloc(size);
    add_to_heap(block, 1);
    return block;
}

void *calloc(size_t count, size_t size) {
    void *block = __libc_calloc(count, size);
    add_to_heap(block, 1);
    return block;
}

void free(void *block) {
    if (!block) return;
    add_to_heap(block, -1);
    if (!((uintptr_t)block & 63)) forget(block);
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    add_to_heap(block, -1);
    void *moved = __libc_realloc(block, size);
    add_to_heap(moved ? moved : size ? block : NULL, 1);
    return moved;
}

static void *aligned(size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    add_to_heap(block, 1);
    return block;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = aligned(alignment, size);
    if (!block) return ENOMEM;
    *out = block;
    if (alignment >= 64) remember(block, size);
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) { return aligned(alignment, size); }
void *memalign(size_t alignment, size_t size) { return aligned(alignment, size); }

long long counted_tensors(void) { return tensors; }
long long counted_tensors_peak(void) { return tensors_peak; }
long long counted_heap(void) { return __atomic_load_n(&heap, __ATOMIC_RELAXED); }
void counted_reset(void) {
    pthread_mutex_lock(&lock);
    tensors_peak = tensors;
    pthread_mutex_unlock(&lock);
}
