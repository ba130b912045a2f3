// Drives the server's own page in a real browser, as a person would: types, sends, stops, folds, and looks at it in dark and light and on a phone.
//   node tools/page.mjs URL CHROMIUM FOLDER SCENE
// Prints one line of JSON with what it saw; tests/test_page.py starts the servers and judges. playwright-core is found through NODE_PATH.
import { createRequire } from 'module';
import { join } from 'path';
const { chromium } = createRequire(import.meta.url)('playwright-core');
const [url, executablePath, folder, scene] = process.argv.slice(2);

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-dev-shm-usage'] });
const seen = { errors: [], requests: [] };
const shot = (page, name) => page.screenshot({ path: join(folder, name + '.png') });

async function open(options = {}) {
    const page = await browser.newPage({ viewport: { width: 900, height: 700 }, ...options });
    page.setDefaultTimeout(30_000);
    page.on('console', m => { if (m.type() === 'error' && !/status of (401|503|429)/.test(m.text())) seen.errors.push(m.text()); });
    page.on('pageerror', e => seen.errors.push(String(e)));
    page.on('request', r => seen.requests.push(new URL(r.url()).origin + new URL(r.url()).pathname));
    await page.goto(url);
    return page;
}
const say = async (page, text) => { await page.locator('#prompt').fill(text); await page.keyboard.press('Enter'); };
const answered = (page, n) => page.waitForFunction(n => document.querySelectorAll('.turn.assistant:not(.busy)').length >= n, n, { polling: 100 });
const ready = page => page.waitForFunction(() => document.querySelector('#state').textContent === 'ready', null, { polling: 100 });
const texts = (page, where) => page.locator(where).allTextContents();

const scenes = {
    async talk() {                                     // keyboard only
        const page = await open();
        await ready(page);
        await shot(page, 'empty');
        seen.focus = await page.evaluate(() => document.activeElement.id);
        await page.keyboard.type('greet');
        await page.keyboard.press('Shift+Enter');
        await page.keyboard.type('please');
        await page.keyboard.press('Enter');
        await answered(page, 1);
        await say(page, 'think');
        await answered(page, 2);
        seen.folded = !(await page.locator('details.thought').evaluate(d => d.open));
        await page.locator('details.thought summary').focus();
        await page.keyboard.press('Enter');
        seen.unfolded = await page.locator('details.thought').evaluate(d => d.open);
        await say(page, 'code');
        await answered(page, 3);
        await say(page, 'markup');
        await answered(page, 4);
        seen.user = await texts(page, '.turn.user');
        seen.texts = await texts(page, '.turn.assistant .text');
        seen.thoughts = await texts(page, 'details.thought div');
        seen.notes = await texts(page, '.note');
        seen.pre = await texts(page, '.text pre');
        seen.injected = await page.evaluate(() => document.querySelectorAll('#log img, #log b').length + (window.hacked ? 1 : 0));
        seen.title = await page.title();
        await shot(page, 'talk');
        await page.locator('#clear').click();
        seen.cleared = await texts(page, '.turn');
    },
    async stop() {                                     // a long answer, stopped by the button and by a key
        const page = await open();
        await ready(page);
        for (const way of ['button', 'key']) {
            await say(page, 'long');
            await page.waitForFunction(() => (document.querySelector('.busy .text')?.textContent.length ?? 0) > 20, null, { polling: 50 });
            if (way === 'button') { seen.rate = await page.locator('.busy .note').textContent(); await page.locator('#stop').click(); } else await page.keyboard.press('Escape');
            await page.waitForFunction(() => !document.querySelector('.busy'), null, { polling: 50 });
            seen[way] = (await texts(page, '.note')).at(-1);
            seen[way + 'Focus'] = await page.evaluate(() => document.activeElement.id);
        }
    },
    async reload() {                                   // what a reload keeps, and what the button forgets
        const page = await open(), asked = [];
        page.on('request', r => { if (r.method() === 'POST') asked.push(JSON.parse(r.postData()).messages); });
        const look = async name => { seen[name] = { user: await texts(page, '.turn.user'), texts: await texts(page, '.turn.assistant .text'), thoughts: await texts(page, 'details.thought div'), notes: await texts(page, '.note'), prompt: await page.locator('#prompt').inputValue(), system: await page.locator('#system').inputValue(), busy: await page.locator('.busy').count() }; };
        await ready(page);
        await page.locator('#more summary').click();
        await page.locator('#system').fill('Be brief.');
        const height = () => page.evaluate(() => document.querySelector('#main').clientHeight);
        seen.open = await height();
        await shot(page, 'settings');
        await page.keyboard.press('Escape');
        seen.closed = await height();
        seen.panel = await page.locator('#more').evaluate(d => d.open);
        await say(page, 'greet');
        await answered(page, 1);
        await say(page, 'think');
        await answered(page, 2);
        await look('before');
        await page.reload();
        await ready(page);
        await look('after');
        await shot(page, 'reloaded');
        await say(page, 'long');                       // reloaded in the middle of an answer
        await page.waitForFunction(() => (document.querySelector('.busy .text')?.textContent.length ?? 0) > 20, null, { polling: 50 });
        await page.reload();
        await ready(page);
        await look('half');
        await say(page, 'greet');
        await answered(page, 4);
        seen.asked = asked.at(-1);
        await page.route('**/v1/chat/completions', () => {});                      // no answer ever comes
        await say(page, 'never');
        await page.reload();
        await ready(page);
        await look('unanswered');
        await page.locator('#clear').click();
        await page.reload();
        await ready(page);
        await look('forgotten');
    },
    async key() {                                      // a server that wants a key
        const page = await open();
        await page.locator('#keybox').waitFor();
        await shot(page, 'key');
        await say(page, 'greet');
        seen.refused = await page.locator('.turn.error').first().textContent();
        seen.kept = await page.locator('#prompt').inputValue();
        await page.locator('#key').fill('wrong');
        await page.keyboard.press('Enter');
        await page.locator('.turn.error', {hasText: 'wrong'}).waitFor();
        seen.wrong = await page.locator('.turn.error').last().textContent();
        await page.locator('#key').fill('secret');
        await page.keyboard.press('Enter');                // the question goes out again by itself
        await answered(page, 1);
        seen.texts = await texts(page, '.turn.assistant .text');
        seen.url = page.url();
    },
    async loading() {                                  // opened before the model is there
        const page = await open();
        await page.waitForFunction(() => document.querySelector('#state').textContent.startsWith('loading'), null, { polling: 50 });
        seen.state = await page.locator('#state').textContent();
        seen.disabled = await page.locator('#send').isDisabled();
        await ready(page);
        seen.enabled = !(await page.locator('#send').isDisabled());
    },
    async fault() {                                    // the model fails in the middle of an answer
        const page = await open();
        await ready(page);
        await say(page, 'x');
        seen.error = await page.locator('.turn.error').textContent();
        seen.busy = await page.locator('.busy').count();
    },
    async looks() {                                    // dark and light, narrow and wide
        for (const [name, options] of Object.entries({ light: {}, dark: { colorScheme: 'dark' }, phone: { viewport: { width: 360, height: 640 }, isMobile: true, hasTouch: true }, phone_dark: { viewport: { width: 360, height: 640 }, isMobile: true, hasTouch: true, colorScheme: 'dark' } })) {
            const page = await open(options);
            await ready(page);
            await say(page, 'think');
            await answered(page, 1);
            await say(page, 'code');
            await answered(page, 2);
            if (name === 'phone') await page.locator('#more summary').click();
            await page.waitForTimeout(300);
            await shot(page, name);
            const [wide, back, text] = await page.evaluate(() => [document.documentElement.scrollWidth <= innerWidth && document.querySelector('#main').scrollWidth <= document.querySelector('#main').clientWidth, getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]);
            seen[name] = { fits: wide, back, text };
        }
    },
    async picture() {
        const page = await open({ viewport: { width: 620, height: 520 } });
        await ready(page);
        await say(page, 'think');
        await answered(page, 1);
        await page.locator('details.thought summary').click();
        await say(page, 'code');
        await answered(page, 2);
        await shot(page, 'picture');
    },
};
try { await scenes[scene](); } catch (error) { seen.failed = String(error); }
console.log(JSON.stringify(seen));
await browser.close();
