/* rounds: functions over the state of the sequences */
/* the token at a position of a sequence: of its text, or of its draft behind that */
INLINE int32_t token_at(const int32_t *text, const int32_t *draft, long length, long position, long columns, long width) {
    if (position < length) return text[max_l(0, min_l(position, columns - 1))];
    return draft[min_l(position - length, width - 1)];
}

int ssd_prepare_rows(const void *given, int threads) {
    const struct prepare_rows *a = given;
    const int32_t *slots = a->slots, *length = a->length, *query_start = a->query_start;
    for (long work = 0; work < a->works; work++) {
        long slot = slots[work];
        a->context_len[work] = 0;
        if (slot < 0) continue;
        if (slot >= a->num_slots || length[slot] < 1 || length[slot] > a->columns) return 1;
        long first = a->starts[work] < 0 ? length[slot] - 1 : a->starts[work];
        a->context_len[work] = (int32_t)(first + query_start[work + 1] - query_start[work]);
    }
    for (long row = 0; row < a->rows; row++) {
        long work = a->row_work[row];
        a->tokens[row] = a->positions[row] = 0, a->slot_mapping[row] = -1;
        if (work < 0) continue;
        if (work >= a->works || slots[work] < 0) return 1;
        long slot = slots[work], position = (long)a->context_len[work] - query_start[work + 1] + row;
        if (position < 0) return 1;
        long block = position / a->block_size;
        const int32_t *table = a->tables + slot * a->table_columns;
        a->tokens[row] = token_at(a->token_ids + slot * a->columns, a->drafts + slot * a->width, length[slot], position,
                                  a->columns, a->width);
        a->positions[row] = (int32_t)position;
        if (block < min_l(table[0], a->table_columns - 1))
            a->slot_mapping[row] = (int32_t)(table[1 + block] * a->block_size + position % a->block_size);
    }
    for (long i = 0; i < a->logits; i++) {
        long row = max_l(0, a->logit_rows[i]);
        if (row >= a->rows) return 1;
        long work = a->logit_rows[i] < 0 ? -1 : a->row_work[row];
        a->gather[i] = row, a->decided_slot[i] = -1, a->decided[i] = 1, a->num_drafted[i] = 0;
        if (work < 0) continue;
        a->decided_slot[i] = slots[work];
        a->decided[i] = a->positions[row] + 1;
        a->num_drafted[i] = (int32_t)max_l(0, a->decided[i] - length[slots[work]]);
    }
    return 0;
}

int ssd_accept(const void *given, int threads) {
    const struct accept *a = given;
    const long width = a->width;
    int32_t *length = a->length;
    for (long work = 0; work < a->works; work++) {
        long slot = a->slots[work], first = a->first_row[work], count = a->num_logits[work], accepted = 0;
        int32_t *row = a->out + work * (3 + 2 * width), *new_tokens = row + 2;
        memset(row, 0, (size_t)(3 + 2 * width) * 4);
        if (first < 0) continue;
        if (outside(slot, a->num_slots) || count < 1 || count > width + 1 || first + count > a->rows) return 1;
        if (length[slot] < 0) return 1;
        const int32_t *draft = a->drafts + slot * width;
        int32_t *text = a->token_ids + slot * a->columns;
        for (long i = 0; i < count; i++) new_tokens[i] = (int32_t)min_l(a->chosen[first + i], a->vocab_size - 1);
        while (accepted < count - 1 && draft[accepted] == new_tokens[accepted]) accepted++;
        for (long i = 0; i <= accepted && length[slot] < a->columns; i++)
            text[length[slot]++] = (int32_t)max_l(new_tokens[i], 0);
        a->num_accepted[slot] = (int32_t)accepted;
        row[0] = (int32_t)accepted + 1;
        row[1] = a->origin[slot];
        memcpy(row + 3 + width, draft, (size_t)(count - 1) * 4);
    }
    return 0;
}

/* Trees.  Node i of a sequence's draft is row 1 + i of its work, and in the slot of that place behind the last decided token; it
 * is a node only if that slot exists, and its ancestors come before it and are no more than `depth` - 1. */
#define NO_NODES (1 << 30) /* as the first position that is not decided */

int ssd_place_nodes(const void *given, int threads) {
    const struct place_nodes *a = given;
    const long depth = a->depth;
    for (long row = 0; row < a->rows; row++) {
        long work = a->row_work[row];
        a->shared[row] = NO_NODES, a->before[row] = (int32_t)max_l(0, row - 1);
        if (work < 0 || a->starts[work] >= 0) continue;
        if (work >= a->works || outside(a->slots[work], a->num_slots)) return 1;
        const int32_t *parents = a->parents + a->slots[work] * a->width;
        long first = a->query_start[work], node = row - first - 1, above = 0;
        if (node >= a->width) return 1;
        for (long i = node, parent; i >= 0; i = parent) {
            parent = parents[i];
            if (parent < -1 || parent >= i || ++above > depth) {
                above = 0;
                break;
            }
        }
        long base = a->length[a->slots[work]] - 1;
        a->positions[row] = (int32_t)(base + above), a->shared[row] = (int32_t)(base + 1);
        a->before[row] = (int32_t)(above ? first + 1 + parents[node] : first);
        for (long i = node, place = above; place > 0; i = parents[i])
            a->paths[row * depth + --place] = (int32_t)(first + 1 + i);
    }
    for (long i = 0; i < a->logits; i++) {
        long row = a->logit_rows[i], work = row < 0 ? -1 : a->row_work[row];
        if (work < 0 || a->starts[work] >= 0) continue;
        long slot = a->slots[work], first = a->query_start[work], above = a->positions[row] + 1 - a->length[slot];
        if (row > first && (!above || a->slot_mapping[row] < 0)) a->decided_slot[i] = -1;
        a->decided[i] = a->positions[row] + 1, a->num_drafted[i] = (int32_t)above;
        for (long j = 0; j < above; j++)
            a->path_tokens[i * depth + j] = a->drafts[slot * a->width + a->paths[row * depth + j] - first - 1];
    }
    return 0;
}

int ssd_accept_node(const void *given, int threads) {
    const struct accept_node *a = given;
    const long width = a->width;
    int32_t *length = a->length;
    for (long work = 0; work < a->works; work++) {
        long slot = a->slots[work], first = a->first_row[work], count = a->num_logits[work], accepted = 0;
        int32_t *row = a->out + work * (3 + 3 * width), *new_tokens = row + 2;
        memset(row, 0, (size_t)(3 + 3 * width) * 4);
        if (first < 0) continue;
        if (outside(slot, a->num_slots) || count < 1 || count > width + 1 || first + count > a->rows) return 1;
        if (length[slot] < 0) return 1;
        const int32_t *draft = a->drafts + slot * width, *parents = a->parents + slot * width;
        int32_t *text = a->token_ids + slot * a->columns, *path = a->path + slot * width;
        new_tokens[0] = (int32_t)min_l(a->chosen[first], a->vocab_size - 1);
        for (long i = 0, node = -1; i < count - 1; i++) {
            if (parents[i] != node || draft[i] != new_tokens[accepted] || a->decided_slot[first + 1 + i] < 0) continue;
            path[accepted++] = (int32_t)(node = i);
            new_tokens[accepted] = (int32_t)min_l(a->chosen[first + 1 + i], a->vocab_size - 1);
        }
        for (long i = 0; i <= accepted && length[slot] < a->columns; i++)
            text[length[slot]++] = (int32_t)max_l(new_tokens[i], 0);
        a->num_accepted[slot] = (int32_t)accepted;
        row[0] = (int32_t)accepted + 1;
        row[1] = a->origin[slot];
        memcpy(row + 3 + width, draft, (size_t)(count - 1) * 4);
        memcpy(row + 3 + 2 * width, path, (size_t)accepted * 4);
    }
    return 0;
}

int ssd_move_accepted(const void *given, int threads) {
    const struct move_accepted *a = given;
    for (long work = 0; work < a->works; work++) {
        if (a->first_row[work] < 0) continue;
        long slot = a->slots[work], accepted = a->num_accepted[slot], first = a->length[slot] - accepted - 1;
        const int32_t *path = a->path + slot * a->width, *table = a->tables + slot * a->table_columns;
        if (a->length[slot] >= a->columns) continue; /* far beyond the sequence's end */
        for (long j = 0; j < accepted; j++) {
            long from = first + path[j], to = first + j, block = from / a->block_size;
            if (from == to || block >= table[0]) continue;
            from = table[1 + block] * a->block_size + from % a->block_size;
            to = table[1 + to / a->block_size] * a->block_size + to % a->block_size;
            for (long i = 0; i < a->num_caches; i++) {
                char *cache = (char *)(intptr_t)a->caches[2 * i];
                long size = a->caches[2 * i + 1];
                memcpy(cache + to * size, cache + from * size, (size_t)size);
            }
        }
    }
    return 0;
}

#define FOLLOWING 64 /* beams of a sequence, at most */

/* gives each row `size` bytes of the row that it follows */
static void follow(char *memory, long row_size, long size, const struct follow_rows *a) {
    enum { BYTES = 256 };
    char kept[FOLLOWING][BYTES];
    const long beams = a->beams;
    for (long first = 0; first < a->sequences * beams; first += beams) /* rows follow rows of their own sequence */
        for (long at = 0; at < size; at += BYTES) {
            const size_t bytes = (size_t)min_l(BYTES, size - at);
            for (long b = 0; b < beams; b++) memcpy(kept[b], memory + a->above[first + b] * row_size + at, bytes);
            for (long b = 0; b < beams; b++) memcpy(memory + (first + b) * row_size + at, kept[b], bytes);
        }
}

int ssd_follow_rows(const void *given, int threads) {
    const struct follow_rows *a = given;
    const long rows = a->sequences * a->beams;
    if (a->beams > FOLLOWING) return 1;
    for (long row = 0; row < rows; row++)
        if (outside(a->above[row], rows)) return 1;
    for (long i = 0; i < a->num_caches; i++) {
        const long size = a->caches[2 * i + 1];
        char *cache = (char *)(intptr_t)a->caches[2 * i] + a->first_slot * size;
        follow(cache, a->slots_per_branch * size, a->depth * size, a);
    }
    if (a->states) follow(a->states, a->state_size, a->state_size, a);
    return 0;
}

int ssd_stage(const void *given, int threads) {
    const struct stage *a = given;
    const long width = a->width, reads = a->reads;
    for (long i = 0; i < a->sequences; i++) {
        long slot = a->slots[i], size, begin;
        if (outside(slot, a->num_slots)) return 1;
        size = a->length[slot], begin = size - 1;
        if (!a->fork) begin = max_l(min_l(a->computed[slot], begin), size - reads);
        a->first[i] = (int32_t)begin, a->count[i] = (int32_t)(size - begin + a->num_drafted[i]);
        const int32_t *text = a->token_ids + slot * a->columns, *draft = a->drafts + slot * width;
        for (long j = 0; j <= reads; j++) {
            long token = token_at(text, draft, size, begin + j, a->columns, width);
            a->tokens[i * (reads + 1) + j] = (int32_t)min_l(token, a->vocab_size - 1);
        }
        a->computed[slot] = a->first[i] + a->count[i];
        if (!a->fork) continue;
        memcpy(a->verified_confidence + i * width, a->confidence + slot * width, (size_t)width * 4);
        a->hit[i] = a->origin[slot] == a->hit_origin;
    }
    return 0;
}

int ssd_read_rows(const void *given, int threads) {
    const struct read_rows *a = given;
    const long reads = a->reads, width = a->width, rows = a->sequences * width;
    for (long i = 0, row = 0; i < a->sequences; i++) {
        const int32_t *table = a->tables + a->table_rows[i] * a->ld_tables;
        long first = a->first[i], read = min_l(a->count[i], reads), blocks = min_l(table[0], a->table_columns - 1);
        if (first < 0) return 1;
        for (long j = 0; j < reads; j++, row++) {
            long position = first + j, block = position / a->block_size;
            int known = j < a->count[i] && block < blocks;
            a->tokens[row] = a->given[i * a->ld_given + j], a->positions[row] = (int32_t)position;
            a->slot_mapping[row] =
                (int32_t)(known ? table[1 + block] * a->block_size + position % a->block_size : a->padding_slot);
        }
        a->context_len[i] = (int32_t)(first + reads), a->decided[i] = (int32_t)(first + read);
        a->last[i] = i * reads + read - 1;
        for (long depth = 0; depth < a->depths; depth++)
            for (long beam = i * width; beam < (i + 1) * width; beam++) {
                int32_t *to = a->beams + depth * 4 * rows + beam;
                to[0] = (int32_t)(first + read + depth), to[2 * rows] = to[0] + 1, to[3 * rows] = a->slots[i];
                to[rows] = (int32_t)(a->first_slot + beam * a->slots_per_branch + depth);
            }
    }
    return 0;
}

int ssd_look_up(const void *given, int threads) {
    const struct look_up *a = given;
    const long width = a->width, branches = a->branches, ld = a->ld, depth = a->depth;
    const int32_t *after = a->after;
    for (long i = 0; i < a->sequences; i++, after += a->ld_after) {
        long slot = a->slots[i], found = -1, exact = 0;
        if (outside(slot, a->num_slots) || depth > width || depth >= ld) return 1;
        long length = a->length[slot];
        int32_t last = length < 1 ? -1 : a->token_ids[slot * a->columns + min_l(length, a->columns) - 1];
        for (long b = 0; b < branches && !exact; b++) {
            if (after[b] != a->num_accepted[slot]) continue;
            exact = a->chain[(i * branches + b) * ld] == last;
            if (exact || found < 0) found = b;
        }
        long row = i * branches + max_l(found, 0);
        float *confidence = a->confidence + slot * width;
        memset(confidence, 0, (size_t)width * 4);
        a->origin[slot] = (int32_t)(exact ? a->hit : a->miss), a->rows[i] = (int32_t)row;
        if (found >= 0) memcpy(a->drafts + slot * width, a->chain + row * ld + 1, (size_t)depth * 4);
        if (exact) memcpy(confidence, a->chain_confidence + row * ld + 1, (size_t)depth * 4);
    }
    return 0;
}

int ssd_store(const void *given, int threads) {
    const struct store *a = given;
    for (long i = 0; i < a->sequences; i++) {
        long slot = a->slots[i];
        if (outside(slot, a->num_slots) || a->count > a->width || a->count > a->ld) return 1;
        memcpy(a->drafts + slot * a->width, a->chain + i * a->ld, (size_t)a->count * 4);
        memcpy(a->confidence + slot * a->width, a->chain_confidence + i * a->ld, (size_t)a->count * 4);
        a->origin[slot] = (int32_t)a->value;
    }
    return 0;
}

int ssd_extend_rows(const void *given, int threads) {
    const struct extend_rows *a = given;
    for (long row = 0; row < a->rows; row++) {
        long i = row / a->branches;
        long read = a->after ? a->after[i * a->ld_after + row % a->branches] + 1 : min_l(a->count[i], a->reads);
        a->tokens[row] = (int32_t)min_l(a->chain[row * a->ld + a->depth], a->vocab_size - 1);
        a->positions[row] = (int32_t)(a->first[i] + read + a->depth);
        a->slot_mapping[row] = (int32_t)(a->first_slot + row * a->slots_per_branch + a->depth);
        a->decided[row] = a->positions[row] + 1;
        a->row_slots[row] = a->slots[i];
    }
    return 0;
}

int ssd_block_rows(const void *given, int threads) {
    const struct block_rows *a = given;
    for (long i = 0, row = 0; i < a->sequences; i++) {
        long slot = a->slots[i];
        if (outside(slot, a->num_slots) || a->length[slot] < 1 || a->length[slot] > a->columns) return 1;
        long first = a->length[slot] - 1;
        const int32_t *table = a->tables + slot * a->table_columns;
        for (long place = 0; place < a->queries; place++, row++) {
            long position = first + place, block = position / a->block_size, written = place - a->queries + a->count;
            int known = block < min_l(table[0], a->table_columns - 1);
            a->tokens[row] = place ? (int32_t)a->mask_token : a->token_ids[slot * a->columns + first];
            a->positions[row] = (int32_t)position;
            a->slot_mapping[row] = known ? (int32_t)(table[1 + block] * a->block_size + position % a->block_size) : -1;
            a->context_len[row] = (int32_t)(first + a->queries), a->row_slots[row] = (int32_t)slot;
            if (written < 0) continue;
            a->decided[i * a->ld_sequence + written * a->ld_place] = (int32_t)(first + 1 + written);
            a->decided_slot[i * a->ld_sequence + written * a->ld_place] = (int32_t)slot;
        }
    }
    return 0;
}

/* The first of `found` tokens of each row, and by how much its score is the largest; -inf less -inf, where there is no token
 * at all, is 0. */
int ssd_keep_best(const void *given, int threads) {
    const struct keep_best *a = given;
    const float lowest = -1e38f, *scores = a->scores;
    for (long row = 0; row < a->rows; row++, scores += a->found) {
        float margin = (scores[0] < lowest ? lowest : scores[0]) - (scores[1] < lowest ? lowest : scores[1]);
        long at = row / a->each * a->ld + a->column + row % a->each;
        a->chain[at] = (int32_t)max_l(a->best[row * a->found], 0);
        a->confidence[at] = margin > a->max_confidence ? a->max_confidence : margin;
    }
    return 0;
}
