/* latency NANOSECONDS NAMESPACE...: delays every packet that queue 0 of these network namespaces gets.
 *
 * The packets stay in the kernel: this process reads only their numbers (NFQNL_COPY_META), and accepts all that are due with
 * one message. It prints a line when all queues exist, and runs until it is killed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define QUEUES 64
#define HELD (1u << 15) /* packets that one queue holds at most; the kernel passes more on without a delay */

struct queue {
    int socket;
    uint32_t ids[HELD];
    int64_t due[HELD];
    uint32_t first, last;
};

static struct queue queues[QUEUES];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Sends one message with one attribute about queue 0. */
static void tell(int socket, int type, int flags, int attribute, const void *value, int size) {
    struct {
        struct nlmsghdr head;
        struct nfgenmsg about;
        char rest[64];
    } message = {0};
    struct nlattr *first = (struct nlattr *)message.rest;
    first->nla_type = attribute;
    first->nla_len = NLA_HDRLEN + size;
    memcpy(message.rest + NLA_HDRLEN, value, size);
    message.head.nlmsg_len = NLMSG_LENGTH(sizeof message.about) + NLA_ALIGN(first->nla_len);
    message.head.nlmsg_type = (NFNL_SUBSYS_QUEUE << 8) | type;
    message.head.nlmsg_flags = NLM_F_REQUEST | flags;
    message.about.nfgen_family = AF_UNSPEC;
    message.about.version = NFNETLINK_V0;
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    if (sendto(socket, &message, message.head.nlmsg_len, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0) fail("sendto");
    if (flags & NLM_F_ACK) {
        char answer[512];
        if (recv(socket, answer, sizeof answer, 0) < 0) fail("recv");
        struct nlmsghdr *head = (struct nlmsghdr *)answer;
        if (head->nlmsg_type == NLMSG_ERROR && ((struct nlmsgerr *)NLMSG_DATA(head))->error) {
            fprintf(stderr, "netfilter refused attribute %d\n", attribute);
            exit(1);
        }
    }
}

static int join(const char *namespace) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int file = open(path, O_RDONLY);
    if (file < 0 || setns(file, CLONE_NEWNET)) fail(path);
    close(file);
    int made = socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER);
    if (made < 0) fail("socket");
    int bytes = 1 << 23, one = 1;
    setsockopt(made, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
    setsockopt(made, SOL_NETLINK, NETLINK_NO_ENOBUFS, &one, sizeof one);
    struct nfqnl_msg_config_cmd bind = {.command = NFQNL_CFG_CMD_BIND, .pf = htons(AF_INET)};
    tell(made, NFQNL_MSG_CONFIG, NLM_F_ACK, NFQA_CFG_CMD, &bind, sizeof bind);
    struct nfqnl_msg_config_params numbers = {.copy_range = 0, .copy_mode = NFQNL_COPY_META};
    tell(made, NFQNL_MSG_CONFIG, NLM_F_ACK, NFQA_CFG_PARAMS, &numbers, sizeof numbers);
    uint32_t most = htonl(HELD - 1);
    tell(made, NFQNL_MSG_CONFIG, NLM_F_ACK, NFQA_CFG_QUEUE_MAXLEN, &most, sizeof most);
    uint32_t flags = htonl(NFQA_CFG_F_FAIL_OPEN | NFQA_CFG_F_GSO); /* large packets are not split */
    struct {
        struct nlmsghdr head;
        struct nfgenmsg about;
        struct nlattr first;
        uint32_t flags;
        struct nlattr second;
        uint32_t mask;
    } message = {
        .head = {sizeof message, (NFNL_SUBSYS_QUEUE << 8) | NFQNL_MSG_CONFIG, NLM_F_REQUEST, 0, 0},
        .first = {NLA_HDRLEN + 4, NFQA_CFG_FLAGS},
        .flags = flags,
        .second = {NLA_HDRLEN + 4, NFQA_CFG_MASK},
        .mask = flags,
    };
    if (send(made, &message, sizeof message, 0) < 0) fail("send");
    return made;
}

/* Reads the numbers of all packets that have arrived. */
static void take(struct queue *q, int64_t delay) {
    char buffer[16384];
    for (;;) {
        int size = recv(q->socket, buffer, sizeof buffer, MSG_DONTWAIT);
        if (size <= 0) return;
        int64_t due = now() + delay;
        for (struct nlmsghdr *head = (struct nlmsghdr *)buffer; NLMSG_OK(head, (unsigned)size); head = NLMSG_NEXT(head, size)) {
            if (head->nlmsg_type != ((NFNL_SUBSYS_QUEUE << 8) | NFQNL_MSG_PACKET)) continue;
            char *at = (char *)NLMSG_DATA(head) + NLMSG_ALIGN(sizeof(struct nfgenmsg)), *end = (char *)head + head->nlmsg_len;
            while (at < end) {
                struct nlattr *attribute = (struct nlattr *)at;
                if ((attribute->nla_type & NLA_TYPE_MASK) == NFQA_PACKET_HDR) {
                    uint32_t slot = q->last++ % HELD;
                    q->ids[slot] = ntohl(((struct nfqnl_msg_packet_hdr *)(at + NLA_HDRLEN))->packet_id);
                    q->due[slot] = due;
                }
                at += NLA_ALIGN(attribute->nla_len);
            }
        }
    }
}

int main(int count, char **arguments) {
    int64_t delay = atoll(arguments[1]);
    int number = count - 2;
    struct pollfd polled[QUEUES];
    for (int i = 0; i < number; i++) {
        queues[i].socket = join(arguments[i + 2]);
        polled[i] = (struct pollfd){queues[i].socket, POLLIN, 0};
    }
    /* Packets must not wait for the ranks that compute. */
    struct sched_param priority = {.sched_priority = 50};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("sched_setscheduler");
    prctl(PR_SET_TIMERSLACK, 1);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = INT64_MAX, time = now();
        for (int i = 0; i < number; i++) {
            struct queue *q = &queues[i];
            uint32_t before = q->first;
            while (q->first != q->last && q->due[q->first % HELD] <= time) q->first++;
            if (q->first != before) {
                struct nfqnl_msg_verdict_hdr accept = {htonl(NF_ACCEPT), htonl(q->ids[(q->first - 1) % HELD])};
                tell(q->socket, NFQNL_MSG_VERDICT_BATCH, 0, NFQA_VERDICT_HDR, &accept, sizeof accept);
            }
            if (q->first != q->last && q->due[q->first % HELD] < next) next = q->due[q->first % HELD];
        }
        int64_t left = next == INT64_MAX ? 1000000000 : next - now();
        if (left < 0) left = 0;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        if (ppoll(polled, number, &wait, NULL) < 0) fail("ppoll");
        for (int i = 0; i < number; i++)
            if (polled[i].revents) take(&queues[i], delay);
    }
}
