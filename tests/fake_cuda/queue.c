/* Jobs in order on a thread of their own: the host goes on, and an event that was recorded behind a
   collective that never ends is never reached, as on a card. */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Job *first, *last;
static uint64_t num_enqueued, num_done;
static bool is_running;

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!first) pthread_cond_wait(&changed, &lock);
        Job *job = first;
        first = job->next;
        if (!first) last = NULL;
        pthread_mutex_unlock(&lock);
        job->run(job);
        free(job);
        pthread_mutex_lock(&lock);
        num_done++;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

uint64_t enqueue(Job *job) {
    pthread_mutex_lock(&lock);
    if (!is_running) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) abort();
        pthread_detach(thread);
        is_running = true;
    }
    job->next = NULL;
    if (last) last->next = job;
    else first = job;
    last = job;
    uint64_t number = ++num_enqueued;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return number;
}

uint64_t enqueued(void) {
    pthread_mutex_lock(&lock);
    uint64_t number = num_enqueued;
    pthread_mutex_unlock(&lock);
    return number;
}

bool is_done(uint64_t number) {
    pthread_mutex_lock(&lock);
    bool done = num_done >= number;
    pthread_mutex_unlock(&lock);
    return done;
}

void wait_for(uint64_t number) {
    pthread_mutex_lock(&lock);
    while (num_done < number) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
