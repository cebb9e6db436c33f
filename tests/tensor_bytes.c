/* LD_PRELOAD: live and peak bytes of all CPU tensors of a process.
 *
 * torch's CPU allocator is the caller of posix_memalign, so counting those blocks counts storages: of every thread,
 * and also those that only C++ holds, such as tensors saved for backward. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define SLOTS (1u << 20)

static void *keys[SLOTS];
static size_t sizes[SLOTS];
static long long live, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *const TOMBSTONE = (void *)1;

static uint32_t place(void *pointer) { return (uint32_t)(((uintptr_t)pointer >> 6) * 2654435761u) & (SLOTS - 1); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    static int (*next)(void **, size_t, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "posix_memalign");
    int error = next(out, alignment, size);
    if (error || !*out) return error;
    pthread_mutex_lock(&lock);
    uint32_t i = place(*out);
    while (keys[i] && keys[i] != TOMBSTONE) i = (i + 1) & (SLOTS - 1);
    keys[i] = *out;
    sizes[i] = size;
    live += (long long)size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *pointer) {
    static void (*next)(void *);
    if (!next) next = dlsym(RTLD_NEXT, "free");
    /* Blocks of posix_memalign(64, ...) are aligned to 64; most others can be told from them without the lock. */
    if (pointer && !((uintptr_t)pointer & 63)) {
        pthread_mutex_lock(&lock);
        for (uint32_t i = place(pointer); keys[i]; i = (i + 1) & (SLOTS - 1)) {
            if (keys[i] == pointer) {
                keys[i] = TOMBSTONE;
                live -= (long long)sizes[i];
                break;
            }
        }
        pthread_mutex_unlock(&lock);
    }
    next(pointer);
}

long long tensor_bytes_live(void) { return live; }
long long tensor_bytes_peak(void) { return peak; }
void tensor_bytes_reset(void) { peak = live; }
