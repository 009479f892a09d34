/* rounds: functions of rounds.py
 * -1 is padding: as a row's work, as a work's slot, as a logit row, as a work's first row. */
/* the token at a position of a sequence: of its text, or of its draft behind that */
INLINE int32_t token_at(const int32_t *text, const int32_t *draft, long length, long position, long columns, long width) {
    if (position < length) return text[max_l(0, min_l(position, columns - 1))];
    return draft[min_l(position - length, width - 1)];
}

int ssd_prepare_rows(const int32_t *row_work, const int32_t *slots, const int32_t *starts, const int32_t *query_start,
                     const int32_t *logit_rows, const int32_t *length, const int32_t *token_ids, const int32_t *drafts,
                     const int32_t *tables, int32_t *tokens, int32_t *positions, int32_t *slot_mapping,
                     int32_t *context_len, int64_t *gather, int32_t *decided_slot, int32_t *decided,
                     int32_t *num_drafted, long rows, long works, long logits, long num_slots, long columns, long width,
                     long table_columns, long block_size) {
    for (long work = 0; work < works; work++) {
        long slot = slots[work];
        context_len[work] = 0;
        if (slot < 0) continue;
        if (slot >= num_slots || length[slot] < 1 || length[slot] > columns) return 1;
        long first = starts[work] < 0 ? length[slot] - 1 : starts[work];
        context_len[work] = (int32_t)(first + query_start[work + 1] - query_start[work]);
    }
    for (long row = 0; row < rows; row++) {
        long work = row_work[row];
        tokens[row] = positions[row] = 0, slot_mapping[row] = -1;
        if (work < 0) continue;
        if (work >= works || slots[work] < 0) return 1;
        long slot = slots[work], position = (long)context_len[work] - query_start[work + 1] + row;
        if (position < 0) return 1;
        long block = position / block_size;
        const int32_t *table = tables + slot * table_columns;
        tokens[row] = token_at(token_ids + slot * columns, drafts + slot * width, length[slot], position, columns, width);
        positions[row] = (int32_t)position;
        if (block < min_l(table[0], table_columns - 1))
            slot_mapping[row] = (int32_t)(table[1 + block] * block_size + position % block_size);
    }
    for (long i = 0; i < logits; i++) {
        long row = max_l(0, logit_rows[i]);
        if (row >= rows) return 1;
        long work = logit_rows[i] < 0 ? -1 : row_work[row];
        gather[i] = row, decided_slot[i] = -1, decided[i] = 1, num_drafted[i] = 0;
        if (work < 0) continue;
        decided_slot[i] = slots[work];
        decided[i] = positions[row] + 1;
        num_drafted[i] = (int32_t)max_l(0, decided[i] - length[slots[work]]);
    }
    return 0;
}

int ssd_accept(const int32_t *chosen, const int32_t *slots, const int32_t *first_row, const int32_t *num_logits,
               int32_t *length, int32_t *token_ids, const int32_t *drafts, int32_t *num_accepted,
               const int32_t *origin, int32_t *out, long rows, long works, long num_slots, long columns, long width,
               long vocab) {
    for (long work = 0; work < works; work++) {
        long slot = slots[work], first = first_row[work], count = num_logits[work], accepted = 0;
        int32_t *row = out + work * (3 + 2 * width), *new_tokens = row + 2;
        memset(row, 0, (size_t)(3 + 2 * width) * 4);
        if (first < 0) continue;
        if (outside(slot, num_slots) || count < 1 || count > width + 1 || first + count > rows) return 1;
        if (length[slot] < 0) return 1;
        const int32_t *draft = drafts + slot * width;
        int32_t *text = token_ids + slot * columns;
        for (long i = 0; i < count; i++) new_tokens[i] = (int32_t)min_l(chosen[first + i], vocab - 1);
        while (accepted < count - 1 && draft[accepted] == new_tokens[accepted]) accepted++;
        for (long i = 0; i <= accepted && length[slot] < columns; i++) text[length[slot]++] = (int32_t)max_l(new_tokens[i], 0);
        num_accepted[slot] = (int32_t)accepted;
        row[0] = (int32_t)accepted + 1;
        row[1] = origin[slot];
        memcpy(row + 3 + width, draft, (size_t)(count - 1) * 4);
    }
    return 0;
}

/* reads: tokens of a sequence that are staged, less one; width: those of a draft */
int ssd_stage(const int32_t *slots, const int32_t *num_drafted, const int32_t *length, const int32_t *token_ids,
              const int32_t *drafts, const float *confidence, const int32_t *origin, int32_t *computed, int32_t *first,
              int32_t *count, int32_t *tokens, float *verified, int32_t *hit, long sequences, long num_slots, long columns,
              long width, long reads, long hit_origin, long vocab, int fork) {
    for (long i = 0; i < sequences; i++) {
        long slot = slots[i], size, begin;
        if (outside(slot, num_slots)) return 1;
        size = length[slot], begin = size - 1;
        if (!fork) begin = max_l(min_l(computed[slot], begin), size - reads);
        first[i] = (int32_t)begin, count[i] = (int32_t)(size - begin + num_drafted[i]);
        for (long j = 0; j <= reads; j++) {
            long token = token_at(token_ids + slot * columns, drafts + slot * width, size, begin + j, columns, width);
            tokens[i * (reads + 1) + j] = (int32_t)min_l(token, vocab - 1);
        }
        computed[slot] = first[i] + count[i];
        if (!fork) continue;
        memcpy(verified + i * width, confidence + slot * width, (size_t)width * 4);
        hit[i] = origin[slot] == hit_origin;
    }
    return 0;
}

/* depth: tokens of a branch behind its first; branches: of a sequence, whose chains have ld numbers each */
int ssd_look_up(const int32_t *slots, const int32_t *after, const int32_t *chain, const float *chain_confidence,
                const int32_t *length, const int32_t *token_ids, const int32_t *num_accepted, int32_t *drafts,
                float *confidence, int32_t *origin, int32_t *rows, long sequences, long branches, long ld_after, long ld,
                long depth, long num_slots, long columns, long width, long hit, long miss) {
    for (long i = 0; i < sequences; i++, after += ld_after) {
        long slot = slots[i], found = -1, exact = 0;
        if (outside(slot, num_slots) || depth > width || depth >= ld) return 1;
        int32_t last = length[slot] < 1 ? -1 : token_ids[slot * columns + min_l(length[slot], columns) - 1];
        for (long b = 0; b < branches && !exact; b++) {
            if (after[b] != num_accepted[slot]) continue;
            exact = chain[(i * branches + b) * ld] == last;
            if (exact || found < 0) found = b;
        }
        long row = i * branches + max_l(found, 0);
        memset(confidence + slot * width, 0, (size_t)width * 4);
        origin[slot] = (int32_t)(exact ? hit : miss), rows[i] = (int32_t)row;
        if (found >= 0) memcpy(drafts + slot * width, chain + row * ld + 1, (size_t)depth * 4);
        if (exact) memcpy(confidence + slot * width, chain_confidence + row * ld + 1, (size_t)depth * 4);
    }
    return 0;
}

int ssd_store(const int32_t *slots, const int32_t *chain, const float *chain_confidence, int32_t *drafts, float *confidence,
              int32_t *origin, long sequences, long ld, long count, long num_slots, long width, long value) {
    for (long i = 0; i < sequences; i++) {
        long slot = slots[i];
        if (outside(slot, num_slots) || count > width || count > ld) return 1;
        memcpy(drafts + slot * width, chain + i * ld, (size_t)count * 4);
        memcpy(confidence + slot * width, chain_confidence + i * ld, (size_t)count * 4);
        origin[slot] = (int32_t)value;
    }
    return 0;
}

/* after: [sequences][branches], or NULL: then every sequence has one row */
void ssd_extend_rows(const int32_t *slots, const int32_t *first, const int32_t *count, const int32_t *after,
                     const int32_t *chain, int32_t *tokens, int32_t *positions, int32_t *mapping, int32_t *decided,
                     int32_t *row_slots, long rows, long branches, long ld_after, long ld, long depth, long reads,
                     long first_slot, long slots_per_branch, long vocab) {
    for (long row = 0; row < rows; row++) {
        long i = row / branches, read = after ? after[i * ld_after + row % branches] + 1 : min_l(count[i], reads);
        tokens[row] = (int32_t)min_l(chain[row * ld + depth], vocab - 1);
        positions[row] = (int32_t)(first[i] + read + depth);
        mapping[row] = (int32_t)(first_slot + row * slots_per_branch + depth);
        decided[row] = positions[row] + 1;
        row_slots[row] = slots[i];
    }
}

/* The first of `found` tokens of each row, and by how much its score is the largest; -inf less -inf, where there is no token
 * at all, is 0. */
void ssd_keep_best(const int32_t *best, const float *scores, int32_t *chain, float *confidence, long rows, long found,
                   long ld, long column, float most) {
    const float lowest = -1e38f;
    for (long row = 0; row < rows; row++, best += found, scores += found) {
        float margin = (scores[0] < lowest ? lowest : scores[0]) - (scores[1] < lowest ? lowest : scores[1]);
        chain[row * ld + column] = (int32_t)max_l(best[0], 0);
        confidence[row * ld + column] = margin > most ? most : margin;
    }
}
