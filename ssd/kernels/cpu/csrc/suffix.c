/* Suffix trees of token sequences, and drafts looked up in them (suffix decoding).  Called by ssd/kernels/cpu/suffix.py.
 *
 * A tree holds the windows of up to DEPTH tokens that begin at each position of its texts, path-compressed: a node is a
 * string that is followed by different tokens, its count the number of windows that begin with it.  Windows are inserted
 * longest first, as soon as a token makes them differ from what the tree has, or they are complete.  So the tree has every
 * string of its texts, and the windows not inserted yet are those at the end of the text which occurred before.
 *
 * Positions count tokens since the tree was made, modulo 2^32; `text` is a ring.  The label of a node is where the newest
 * window through it begins (`ref`), so a label never outlives its text: the oldest window is the first to be removed.  A
 * text is followed by a negative number, where every match ends; in a leaf, which is as deep as a window, it is part of
 * the label.
 *
 * An operation allocates before it changes anything.  Not for several threads at once.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 24          /* tokens of a window */
#define MIN_PROB 0.1f     /* of a drafted token */
#define EXPORT __attribute__((visibility("default")))

struct node {
  int parent, first, next, prev; /* first: the child with most windows, its siblings in no order; 0: none */
  int chain;                     /* the next node of its bucket, or of the free ones */
  int token, depth, count;       /* token: the first of its label; depth: tokens from the root to the label's end */
  uint32_t ref;
};

struct point { /* a string of the tree: the first `depth` tokens of the path to `node` */
  int node, depth;
};

struct tree {
  int *text, *buckets;
  struct node *nodes;          /* nodes[0] is the root */
  uint32_t mask, bucket_mask;  /* sizes of text and buckets - 1 */
  int made, capacity, free;    /* nodes */
  uint32_t limit;              /* tokens and ends of texts that are kept; 0: any number of one text */
  uint32_t start, first, next, end; /* of the oldest text; of the newest, its first window not inserted, its end */
  struct point active;         /* the string from `next` to `end` */
};

/* --- nodes ------------------------------------------------------------------------------------------------------------ */

static int *bucket(const struct tree *t, int parent, int token) {
  uint32_t hash = (uint32_t)parent * 0x9E3779B1u ^ (uint32_t)token * 0x85EBCA6Bu;
  return &t->buckets[(hash ^ hash >> 15) & t->bucket_mask];
}

static int find(const struct tree *t, int parent, int token) {
  int i = *bucket(t, parent, token);
  while (i && (t->nodes[i].parent != parent || t->nodes[i].token != token)) i = t->nodes[i].chain;
  return i;
}

static void enter(struct tree *t, int i) {
  int *first = bucket(t, t->nodes[i].parent, t->nodes[i].token);
  t->nodes[i].chain = *first;
  *first = i;
}

static void leave(struct tree *t, int i) {
  int *at = bucket(t, t->nodes[i].parent, t->nodes[i].token);
  while (*at != i) at = &t->nodes[*at].chain;
  *at = t->nodes[i].chain;
}

/* Puts a node among the children of its parent, after `before` (0: first). */
static void put(struct tree *t, int i, int before) {
  struct node *nodes = t->nodes, *own = &nodes[i];
  int *link = before ? &nodes[before].next : &nodes[own->parent].first;
  own->prev = before;
  own->next = *link;
  if (*link) nodes[*link].prev = i;
  *link = i;
}

static void take(struct tree *t, int i) {
  struct node *nodes = t->nodes, *own = &nodes[i];
  *(own->prev ? &nodes[own->prev].next : &nodes[own->parent].first) = own->next;
  if (own->next) nodes[own->next].prev = own->prev;
}

/* Makes `i` a child of `parent` in the place of `old`. */
static void replace(struct tree *t, int old, int i) {
  int parent = t->nodes[old].parent, before = t->nodes[old].prev;
  leave(t, old);
  take(t, old);
  t->nodes[i].parent = parent;
  t->nodes[i].token = t->nodes[old].token;
  put(t, i, before);
  enter(t, i);
}

static int make(struct tree *t, int depth, int count, uint32_t ref) {
  int i = t->free;
  if (i) t->free = t->nodes[i].chain;
  else i = t->made++;
  t->nodes[i] = (struct node){.depth = depth, .count = count, .ref = ref};
  return i;
}

static void drop(struct tree *t, int i) {
  t->nodes[i].chain = t->free;
  t->free = i;
}

static void hang(struct tree *t, int i, int parent, int token) {
  t->nodes[i].parent = parent;
  t->nodes[i].token = token;
  put(t, i, t->nodes[parent].first);
  enter(t, i);
}

/* --- matching --------------------------------------------------------------------------------------------------------- */

/* Moves a point on by a token, if the tree has that. */
static int step(const struct tree *t, struct point *at, int token) {
  const struct node *node = &t->nodes[at->node];
  if (at->depth == node->depth) {
    int child = find(t, at->node, token);
    if (!child) return 0;
    at->node = child;
  } else if (t->text[(node->ref + at->depth) & t->mask] != token) {
    return 0;
  }
  at->depth++;
  return 1;
}

/* The longest string of `t` that the text of `of` has from one position on, to another at most. */
static struct point match(const struct tree *t, const struct tree *of, uint32_t from, uint32_t to) {
  struct point at = {0, 0};
  while (from != to && step(t, &at, of->text[from & of->mask])) from++;
  return at;
}

/* --- texts ------------------------------------------------------------------------------------------------------------ */

/* Inserts the window `next`; the tree has no more of it than `active`. */
static void insert(struct tree *t) {
  struct node *nodes = t->nodes;
  int at = t->active.node, depth = t->active.depth;
  if (depth < nodes[at].depth) { /* a node where the window leaves the label */
    int upper = make(t, depth, nodes[at].count, nodes[at].ref);
    replace(t, at, upper);
    hang(t, at, upper, t->text[(nodes[at].ref + depth) & t->mask]);
    at = upper;
  }
  if (depth < DEPTH) {
    int leaf = make(t, DEPTH, 0, t->next);
    hang(t, leaf, at, t->text[(t->next + depth) & t->mask]);
    at = leaf;
  }
  for (; at; at = nodes[at].parent) {
    int most = nodes[nodes[at].parent].first;
    nodes[at].count++;
    nodes[at].ref = t->next;
    if (at != most && nodes[at].count >= nodes[most].count) {
      take(t, at);
      put(t, at, 0);
    }
  }
}

/* Removes the oldest window. */
static void remove_oldest(struct tree *t) {
  struct node *nodes = t->nodes;
  int i = 0;
  do {
    i = find(t, i, t->text[(t->start + nodes[i].depth) & t->mask]);
    nodes[i].count--;
  } while (nodes[i].depth < DEPTH);
  if (nodes[i].count) return;
  int parent = nodes[i].parent, left;
  leave(t, i);
  take(t, i);
  drop(t, i);
  left = nodes[parent].first;
  if (parent && !nodes[left].next) { /* a label of two nodes */
    leave(t, left);
    replace(t, parent, left);
    drop(t, parent);
  }
}

/* Removes the oldest text, whose end says how many windows it has. */
static void remove_text(struct tree *t) {
  uint32_t end = t->start;
  while (t->text[end & t->mask] >= 0) end++;
  for (int left = -1 - t->text[end & t->mask]; left > 0; left--, t->start++) remove_oldest(t);
  t->start = end + 1;
}

/* Makes room for a token, after which up to DEPTH windows are inserted.  -1: out of memory. */
static int reserve(struct tree *t) {
  if (!t->limit && t->end + 1 > t->mask) {
    int *text = t->mask < (1u << 30) ? realloc(t->text, (t->mask + 1ul) * 2 * sizeof *text) : NULL;
    if (!text) return -1;
    t->text = text;
    t->mask = 2 * t->mask + 1;
  }
  if (t->made + 2 * DEPTH > t->capacity) {
    int capacity = 2 * t->capacity;
    struct node *nodes = capacity < (1 << 30) ? realloc(t->nodes, capacity * sizeof *nodes) : NULL;
    int *buckets = nodes ? realloc(t->buckets, capacity * sizeof *buckets) : NULL;
    if (nodes) t->nodes = nodes;
    if (!buckets) return -1;
    t->buckets = buckets;
    t->capacity = capacity;
    t->bucket_mask = capacity - 1;
    memset(buckets, 0, capacity * sizeof *buckets);
    for (int i = t->free; i; i = nodes[i].chain) nodes[i].parent = -1;
    for (int i = 1; i < t->made; i++)
      if (nodes[i].parent >= 0) enter(t, i);
  }
  return 0;
}

static int append(struct tree *t, int token) {
  if (reserve(t)) return -1;
  t->text[t->end & t->mask] = token;
  t->text[(t->end + 1) & t->mask] = -1;
  t->end++;
  step(t, &t->active, token);
  while (t->next != t->end && (t->active.depth == DEPTH || t->active.depth < (int)(t->end - t->next))) {
    insert(t);
    t->next++;
    t->active = match(t, t, t->next, t->end);
  }
  return 0;
}

EXPORT void ssd_suffix_free(struct tree *t) {
  if (!t) return;
  free(t->text);
  free(t->nodes);
  free(t->buckets);
  free(t);
}

/* A tree of one text, or of texts of up to `limit` tokens together.  NULL: out of memory. */
EXPORT struct tree *ssd_suffix_new(uint32_t limit) {
  struct tree *t = calloc(1, sizeof *t);
  uint32_t size = 64;
  while (size <= limit) size *= 2;
  if (!t) return NULL;
  t->limit = limit;
  t->mask = size - 1;
  t->capacity = 128;
  t->bucket_mask = t->capacity - 1;
  t->made = 1;
  t->text = calloc(size, sizeof *t->text);
  t->nodes = calloc(t->capacity, sizeof *t->nodes);
  t->buckets = calloc(t->capacity, sizeof *t->buckets);
  if (t->text && t->nodes && t->buckets) return t;
  ssd_suffix_free(t);
  return NULL;
}

/* Appends to the newest text.  Returns how many tokens were appended: fewer are out of memory. */
EXPORT uint32_t ssd_suffix_extend(struct tree *t, const int *tokens, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (append(t, tokens[i])) return i;
  return count;
}

/* Adds a whole text to a tree with a limit, the last tokens of one that is too long; the oldest texts make room. */
EXPORT void ssd_suffix_add(struct tree *t, const int *tokens, uint32_t count) {
  uint32_t skipped = count + 1 > t->limit ? count + 1 - t->limit : 0;
  while (t->end - t->start + count - skipped + 1 > t->limit) remove_text(t);
  t->first = t->next = t->end;
  t->active = (struct point){0, 0};
  ssd_suffix_extend(t, tokens + skipped, count - skipped);
  t->text[t->end & t->mask] = -1 - (int)(t->next - t->first);
  t->end++;
}

/* Bytes that a tree has allocated. */
EXPORT uint64_t ssd_suffix_bytes(const struct tree *t) {
  return sizeof *t + (t->mask + 1ul) * sizeof *t->text + t->capacity * (sizeof *t->nodes + sizeof *t->buckets);
}

/* --- drafts ----------------------------------------------------------------------------------------------------------- */

/* What follows a string most often: up to `most` tokens.  Returns how many; the sum of their probabilities is the score.
 *
 * Beyond the depth of the tree it is what follows the newest occurrence, and at the end of the text the draft itself.
 */
static int follow(const struct tree *t, struct point at, int most, int *out, float *score) {
  float prob = 1;
  int count = 0;
  for (*score = 0; count < most; at.depth++) {
    const struct node *node = &t->nodes[at.node];
    if (at.depth == node->depth && node->depth < DEPTH) {
      const struct node *child = &t->nodes[node->first];
      prob *= (float)child->count / (float)node->count;
      if (prob < MIN_PROB) break;
      at.node = node->first;
      node = child;
    }
    uint32_t place = node->ref + at.depth, beyond = place - t->end;
    int token = !t->limit && beyond < (uint32_t)count ? out[beyond] : t->text[place & t->mask];
    if (token < 0) break;
    out[count++] = token;
    *score += prob;
  }
  return count;
}

/* The draft with the highest score after the last m tokens of `of`, for m from `longest` down; see ssd_suffix_draft. */
static int best(const struct tree *t, const struct tree *of, int longest, int most, int *out, float *score) {
  int count = 0, tokens[DEPTH], found;
  float own;
  for (int m = longest; m > 0; m--) {
    int limit = m < most ? m : most;
    if (*score >= (float)limit) break; /* a shorter string has no better draft */
    struct point at = match(t, of, of->end - m, of->end);
    if (at.depth < m) continue;
    found = follow(t, at, limit, tokens, &own);
    if (own > *score) {
      *score = own;
      count = found;
      memcpy(out, tokens, found * sizeof *out);
    }
  }
  return count;
}

/* Up to `most` tokens that may follow the text of `own`, by that text and by the texts of `others` (NULL: none).
 *
 * After the last m tokens there are m tokens at most.  The m with the highest score wins, the longest of equal ones, and
 * `own` before `others`.  The score is the expected number of accepted tokens.  Returns the number of tokens.
 */
EXPORT int ssd_suffix_draft(const struct tree *own, const struct tree *others, int most, int *out, float *score) {
  *score = 0;
  int count = best(own, own, own->active.depth, most, out, score);
  if (others) {
    int found = best(others, own, own->end < DEPTH ? (int)own->end : DEPTH - 1, most, out, score);
    if (found) count = found;
  }
  return count;
}
