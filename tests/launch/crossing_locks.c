// A server in which a thread that takes requests in and one that answers them lock two mutexes each,
// in opposite order. Made twice: as the library that takes inputs, and as the program.

#ifdef LIBRARY

void* TRITONSERVER_InferenceRequestAddInput(void)
{
    return 0;
}

#else

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

enum { NUM_ROUNDS = 20 };

void* TRITONSERVER_InferenceRequestAddInput(void*, const char*, uint32_t, const int64_t*, uint64_t);

static pthread_mutex_t stream = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_mutex_t request = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_barrier_t both_have_one, both_are_done;
static int num_under_stream, num_under_request;

static void count(int* num)
{
    const int before = *(volatile int*)num;
    sched_yield();
    *num = before + 1;
}

static void* answer(void* unused)
{
    for (int i = 0; i < NUM_ROUNDS; ++i) {
        pthread_mutex_lock(&stream);
        pthread_barrier_wait(&both_have_one);
        pthread_mutex_lock(&request);
        count(&num_under_stream);
        count(&num_under_request);
        pthread_mutex_unlock(&request);
        pthread_mutex_unlock(&stream);
        pthread_barrier_wait(&both_are_done);
    }
    return unused;
}

int main(void)
{
    const int64_t shape = 1;
    TRITONSERVER_InferenceRequestAddInput(0, "input", 0, &shape, 1);
    pthread_barrier_init(&both_have_one, 0, 2);
    pthread_barrier_init(&both_are_done, 0, 2);
    pthread_t answering;
    pthread_create(&answering, 0, answer, 0);
    for (int i = 0; i < NUM_ROUNDS; ++i) {
        pthread_mutex_lock(&request);
        pthread_mutex_lock(&request);
        pthread_barrier_wait(&both_have_one);
        pthread_mutex_lock(&stream);
        count(&num_under_stream);
        count(&num_under_request);
        pthread_mutex_unlock(&stream);
        pthread_mutex_unlock(&request);
        count(&num_under_request);
        pthread_mutex_unlock(&request);
        pthread_barrier_wait(&both_are_done);
    }
    pthread_join(answering, 0);
    printf("%d %d", num_under_stream, num_under_request);
    return 0;
}

#endif
