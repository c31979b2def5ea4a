// Has a thread of tritonserver's front ends give way to one that it blocks, and that blocks it.
//
// Triton 2.51.0 has a mutex in each gRPC stream and one in each of its requests. The thread that sends
// a response locks the stream's and then the request's; the one that learns that the client has gone
// locks the request's and then the stream's. Where these meet, both wait for ever, and the latter is
// the only one there is for all streams: none gets a token any more, nobody notices that their
// clients leave, and requests run on to their last token.
//
// So the thread of the front end, when it waits in vain, looks whether whoever has the mutex waits for
// one that it has itself. That one it gives up until it has got the other, as if it had come a moment
// later: so far it has only looked how far its request is, and looks again before it cancels it.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_NS = 20000000 };
enum { MAX_WAITS = 256 };  // Triton's backends answer from some 200 threads

// A thread that answers requests, and the mutex for which it waits; 0 where there is none.
typedef struct {
    _Atomic(pid_t) thread;
    _Atomic(pthread_mutex_t*) mutex;
} Wait;

static Wait waits[MAX_WAITS];
static _Thread_local int is_front_end;

// The calling thread takes requests in.
void note_front_end(void)
{
    is_front_end = 1;
}

// Locks the mutex, and lets the threads of front ends know that this one waits for it.
static int lock_openly(pthread_mutex_t* mutex, int (*lock)(pthread_mutex_t*))
{
    for (int i = 0; i < MAX_WAITS; ++i) {
        pid_t nobody = 0;
        if (atomic_compare_exchange_strong(&waits[i].thread, &nobody, gettid())) {
            waits[i].mutex = mutex;
            const int result = lock(mutex);
            waits[i].mutex = NULL;
            waits[i].thread = 0;
            return result;
        }
    }
    return lock(mutex);
}

// The mutex of the calling thread for which the owner of another one waits; NULL where there is none.
static pthread_mutex_t* blocking_owner(const pthread_mutex_t* mutex)
{
    const pid_t owner = *(volatile const int*)&mutex->__data.__owner;
    for (int i = 0; owner && i < MAX_WAITS; ++i) {
        if (waits[i].thread == owner) {
            pthread_mutex_t* wanted = waits[i].mutex;
            return wanted && wanted->__data.__owner == gettid() ? wanted : NULL;
        }
    }
    return NULL;
}

static int lock_giving_way(pthread_mutex_t* mutex)
{
    while (1) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        const int result = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
        if (result != ETIMEDOUT) {
            return result;
        }
        pthread_mutex_t* held = blocking_owner(mutex);
        if (held) {
            const unsigned depth = held->__data.__count;
            for (unsigned i = 0; i < depth; ++i) {
                pthread_mutex_unlock(held);
            }
            const int late_result = lock_giving_way(mutex);
            for (unsigned i = 0; i < depth; ++i) {
                lock_giving_way(held);
            }
            return late_result;
        }
    }
}

// Locks a recursive mutex of tritonserver that another thread has.
int lock_in_turn(pthread_mutex_t* mutex, int (*lock)(pthread_mutex_t*))
{
    return is_front_end ? lock_giving_way(mutex) : lock_openly(mutex, lock);
}
